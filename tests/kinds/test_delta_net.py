"""Gated delta nets are priced from their sizes, and planned item by item."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lynx.config.experts import Opaque
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.mamba.planning import rule_flops
from megatron_lynx.kinds.mamba.section import CONVOLUTION, DELTA_NET, GATED_NORM, IN_PROJ, RULE, DeltaSizes
from megatron_lynx.plan.plan_file import dump_plan, load_plan
from megatron_lynx.planner import make_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from tests.config.jobs import catalogued_job
from tests.uniform import uniform_plan

SIZES = DeltaSizes(key_heads=16, key_size=128, value_heads=32, value_size=128, convolved=4)


def job_of(layers: tuple[int | str, ...] = (1, "3-4"), sizes: DeltaSizes | None = SIZES, context: int = 1) -> Job:
    """Llama 3 8B with four layers, some of which have the delta nets of Qwen3-Next."""
    layout = {"tensor": 2, "sequence_parallel": True, "context": context}
    job = catalogued_job("llama3-8b", "h100-80g", gpus=2 * context, batch=8, parallel=layout, policy="planned")
    opaque = Opaque(kind="gated_delta_net", layers=layers, delta=sizes)
    model = job.model.model_copy(update={"layers": 4, "opaque": (opaque,)})
    return Job.model_validate({**job.model_dump(by_alias=True), "model": model.model_dump()})


def test_its_items_are_priced() -> None:
    job = job_of()
    profile, shape = analytic_profile(job), LayerShape.of(job)
    items, gemm = profile.opaque["gated_delta_net"].items, profile.attention.items["linear_proj"]
    assert items["delta_out_proj"].forward_s == gemm.forward_s  # 4096 columns, both
    assert items[IN_PROJ].flops == 2 * shape.tokens * 4096 * SIZES.made // 2
    rate = shape.tokens * SIZES.value_heads / 2 * rule_flops(SIZES) / items[RULE].forward_s
    assert 0.02 < rate / 989e12 < 0.5  # its chunks are small
    assert all(items[name].backward_s > items[name].forward_s > 0 for name in (CONVOLUTION, RULE, GATED_NORM))


@pytest.mark.parametrize(
    ("cluster", "tokens", "forward_ms", "backward_ms"),
    [("h200-141g", 8192, 0.472, 1.444), ("h200-141g", 32768, 1.890, 5.697), ("gb200-nvl72", 8192, 0.468, None)],
)
def test_the_rule_takes_what_its_kernels_take(cluster: str, tokens: int, forward_ms: float, backward_ms: float | None) -> None:
    """32 heads of 128, flash-linear-attention 0.5.1, in the benchmark of FlashQLA. By bytes alone the GB200 would take half
    of that."""
    job = job_of()
    seen = catalogued_job("llama3-8b", cluster, gpus=1, batch=1, micro=1, seq=tokens, parallel={})
    model = seen.model.model_copy(update={"layers": 4, "opaque": job.model.opaque})
    items = analytic_profile(Job.model_validate({**seen.model_dump(by_alias=True), "model": model.model_dump()}))
    rule = items.opaque["gated_delta_net"].items[RULE]
    assert 1e3 * rule.forward_s == pytest.approx(forward_ms, rel=0.06)
    if backward_ms is not None:
        assert 1e3 * rule.backward_s == pytest.approx(backward_ms, rel=0.06)


def test_tighter_budgets_recompute_more_of_it(tmp_path: Any) -> None:
    job = job_of()
    profile = analytic_profile(job)
    kept = rehearse(uniform_plan(job, "none"), profile)
    recomputed, steps_s = [], []
    for share in (0.8, 0.6, 0.4):
        tight = job.model_copy(update={"budget": Budget(activation_mib=share * kept.memory(0).peak_bytes / 2**20)})
        plan = make_plan(tight, profile)
        rehearsed = rehearse(plan, profile)
        assert rehearsed.memory(0).peak_bytes <= share * kept.memory(0).peak_bytes
        recomputed.append([item for rule in plan.stages[0].rules for item in rule.recompute if item.startswith("delta")])
        steps_s.append(rehearsed.step_s)
    assert 0 < len(recomputed[0]) < len(recomputed[1]) < len(recomputed[2])
    assert RULE not in recomputed[0]
    assert RULE in recomputed[2]
    assert steps_s[2] < 1.06 * kept.step_s  # stock keeps it whole or recomputes all
    (tmp_path / "plan.yaml").write_text(dump_plan(plan))
    assert load_plan(tmp_path / "plan.yaml") == plan


def test_plans_from_before_its_items_had_names_are_read(tmp_path: Any) -> None:
    """They list `gated_delta_net` under keep."""
    text = dump_plan(uniform_plan(job_of(), "none"))
    old = text.replace(", ".join(DELTA_NET.names[1:-1]), DELTA_NET.name)
    assert text.count(IN_PROJ) == old.count(f"input_layernorm, {DELTA_NET.name}, attention_bda") > 0
    (tmp_path / "plan.yaml").write_text(old)
    assert load_plan(tmp_path / "plan.yaml") == uniform_plan(job_of(), "none")


def test_what_it_cannot_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 with gated_delta_net"):
        uniform_plan(job_of(context=2))
    with pytest.raises(ValueError, match="delta is given with kind gated_delta_net, and only with it"):
        job_of(sizes=None)
    with pytest.raises(ConfigError, match=r"gated_delta_net: key_heads: found 3, needed a multiple of parallel\.tensor"):
        uniform_plan(job_of(sizes=SIZES.model_copy(update={"key_heads": 3})))
