"""FP8 in mixtures of experts and in latent attention under plans: as `test_fp8` and `test_fp8_blocks` have it of usual halves."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest

from megatron_lynx.anatomy import ATTENTION
from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import fp8_copies_bytes
from megatron_lynx.errors import ConfigError
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape
from megatron_lynx.testbed.ranks import RankError, RankPool
from tests.deferring import deferring
from tests.profiler.made_up import saved_parts

from ..long import long
from ..profiler.on_ranks import bytes_saved_by_items
from ..te_releases import pool_with
from ..transparency.checkpoints import checkpointed, without_copies
from ..transparency.offloaded import offloading
from ..transparency.plans import plan_for, recomputable
from ..transparency.test_deferring_experts import LINEARS, into_exchanges
from ..transparency.test_every_bit import checked
from ..transparency.test_experts import exchanging
from ..transparency.test_latent import all_of, latent_plan, together
from ..transparency.trials import Trial, compare_with_stock
from . import fp8_on_ranks, on_ranks, te_on_ranks
from .test_fp8 import STEPPED, fp8_job

MIXTURE: dict[str, Any] = {"count": 4, "per_token": 2, "ffn": 64, "shared_ffn": 64}
LATENT: dict[str, Any] = {"q_rank": 32, "kv_rank": 32, "head_size": 16, "rope_size": 32, "value_head_size": 16}
SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "ffn": 64, "seq": 64, "bias": False}
WIDE: dict[str, Any] = {"hidden": 128, "ffn": 128, "seq": 128}
"""Parts of a sequence that blocks of 128 numbers come out even in."""
EP2: dict[str, Any] = {"replicas": 2, "expert": 2}
SP2: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "EP2": EP2,
    "TP2+SP": SP2,
    "TP2+SP, EP2": {**SP2, "expert": 2, "expert_tensor": 1},
    "PP2": {"pipeline": 2, "microbatches": 4},
    "PP2, EP2": {**EP2, "pipeline": 2, "microbatches": 4},
}


@pytest.fixture
def pool_of(recipe: str, request: pytest.FixtureRequest) -> Callable[[int], RankPool]:
    pools: Callable[[int], RankPool] = request.getfixturevalue("blackwell" if recipe in ("mxfp8", "nvfp4") else "hopper")
    return pools


def job_of(recipe: str, layout: str, like: str = "llama", **fields: Any) -> Job:
    wide = WIDE if recipe == "blockwise" and "SP" in layout else {}
    job: Job = fp8_job(recipe, like, **{**SIZES, **wide, **LAYOUTS[layout], **fields})
    return job


@pytest.mark.parametrize(
    ("recipe", "layout", "filled", "grouped"),
    [
        ("delayed", "EP2", False, True),
        ("mxfp8", "EP2", True, True),
        *long(
            ("tensorwise", "TP2+SP, EP2", True, True),
            ("nvfp4", "EP2", True, True),
            ("nvfp4", "TP2+SP, EP2", False, True),
            ("blockwise", "EP2", True, True),
            ("blockwise", "TP2+SP, EP2", False, True),
            ("delayed", "TP2+SP, EP2", True, False),
            ("tensorwise", "one rank", False, False),
            ("mxfp8", "TP2+SP, EP2", False, True),
        ),
    ],
)
def test_experts(pool_of, recipe, layout, filled, grouped):
    """Of one grouped GEMM, or one by one; rows filled up by the router, which then travel, or before the GEMMs."""
    job = job_of(recipe, layout, experts=MIXTURE | {"filled": filled})
    everything = recomputable(job)
    candidates = [
        plan_for(job, lambda layer: everything, windows=False),
        plan_for(
            job, lambda layer: ("experts_fc1", "experts_activation") if layer % 2 else ("experts_activation",), windows=False
        ),
    ]
    training = {"ddp": True, "optimizer": "megatron"}
    checked(pool_of, job, candidates, Trial(steps=3, training=training, model={"moe_grouped_gemm": grouped}))


@pytest.mark.parametrize(
    ("recipe", "layout"), [("blockwise", "EP2"), *long(("delayed", "EP2"), ("tensorwise", "TP2+SP, EP2"), ("nvfp4", "EP2"))]
)
def test_checkpoints(pool_of, recipe, layout):
    """Layers of latent attention and experts, and halves of them, keep their input: tokens travel again. Copies of what their
    last linears read stay, or these run again, too."""
    job = latent_job(recipe, layout, experts=MIXTURE | {"filled": True}, qk_norm=True)
    kept = experts_plan(job, ())
    candidates = [checkpointed(kept, checkpoint) for checkpoint in ("layer", "attention", "mlp")]
    candidates += [without_copies(one) for one in candidates[::2]]
    model = {"moe_grouped_gemm": True}
    for outcomes in pool_of(job.gpus).run(compare_with_stock, job, candidates, Trial(steps=2, model=model)):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)


@pytest.mark.parametrize("recipe", ["delayed", *long("blockwise")])
def test_experts_whose_weights_are_held_in_fp8(pool_of, recipe):
    job = job_of(recipe, "EP2", experts=MIXTURE, fp8={"recipe": recipe, "parameters": True}, distributed_optimizer=True)
    model = {**STEPPED["model"], "moe_grouped_gemm": True}
    plan = plan_for(job, lambda layer: recomputable(job), windows=False)
    checked(pool_of, job, [plan], Trial(steps=3, training=STEPPED["training"], model=model))


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
def test_everything_at_once(pool_of, recipe):
    """Experts of a pipeline recompute, send what else they keep to the host, and fill exchanges with weight gradients."""
    job = job_of(recipe, "PP2, EP2", layers=4, experts=MIXTURE | {"filled": True})
    recomputed = plan_for(job, lambda layer: ("experts_activation",) if layer % 2 else recomputable(job), windows=False)
    away = offloading(exchanging(recomputed, {}), 20_000, experts=True, pace=5_000)
    planned = deferring(away, LINEARS, lambda wait: into_exchanges(wait) or wait == RECV_BACKWARD)
    trial = Trial(steps=3, training={"ddp": True, "optimizer": "megatron"}, model={**STEPPED["model"], "moe_grouped_gemm": True})
    for [outcome] in checked(pool_of, job, [planned], trial):
        counts = outcome.planned.counts[-1]
        assert min(counts.recomputed, counts.offloaded_bytes, counts.deferred, counts.filled) > 0


@pytest.mark.parametrize("recipe", ["nvfp4"])
def test_a_transformer_engine_that_reads_otherwise(pool_of, recipe):
    """Where its experts are grouped, and compute in FP4."""
    job = job_of(recipe, "one rank", experts=MIXTURE)
    plan = plan_for(job, lambda layer: ("experts_activation",), windows=False)
    [refusal] = pool_of(1).run(on_ranks.refused, job, plan, fp8_on_ranks.with_other_kernels)
    assert [place.rpartition(":")[2] for place in refusal.places] == ["NVFP4Quantizer", "GroupedLinear.forward"]


@pytest.mark.parametrize("recipe", ["blockwise", *long("delayed", "mxfp8")])
def test_what_grouped_linears_keep_is_let_go(pool_of, recipe):
    """Wrappers around bytes and scales, one for each expert: they are overwritten with NaN, and not read. Of every half 16
    tensors in wrappers, and ten others."""
    job = job_of(recipe, "one rank", experts=MIXTURE | {"shared_ffn": 0})
    plan = plan_for(job, lambda layer: ("experts_fc1", "experts_activation"), windows=False)
    [[outcome]] = pool_of(1).run(compare_with_stock, job, [plan], Trial(steps=2, canaries=True, model={"moe_grouped_gemm": True}))
    assert outcome.differing == []
    assert outcome.planned.overwritten == (16 + 10) * job.model.layers * job.microbatches


@pytest.mark.parametrize("recipe", long("blockwise", "delayed", "mxfp8"))
def test_quantized_inputs_of_grouped_experts_go_to_the_host(pool_of, recipe):
    """They are saved as one wrapper for each expert, and come back as they were. `test_fp8` has what usual halves send."""
    job = job_of(recipe, "PP2, EP2", layers=4, experts=MIXTURE | {"filled": True})
    plan = offloading(exchanging(plan_for(job, lambda layer: (), windows=False), {}), 10**9, experts=True, pace=10**9)
    trial = Trial(steps=2, canaries=True, model={"moe_grouped_gemm": True})
    for [outcome] in checked(pool_of, job, [plan], trial):
        assert outcome.planned.counts[-1].offloaded_bytes > 0


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_bytes_of_experts(pool_of, recipe):
    """Item by item, scales included, with rows that are filled up: each expert gets all 40 tokens, 128 of MXFP8 and FP4."""
    seq = {} if recipe in ("mxfp8", "nvfp4") else {"seq": 20}
    job = job_of(recipe, "one rank", experts=MIXTURE | {"per_token": 4}, **seq)  # fused kernels, as on a GPU
    [saved] = pool_of(1).run(partial(bytes_saved_by_items, moe_grouped_gemm=True, bias_activation_fusion=True), job)
    parts = saved_parts(LayerShape.of(job))
    assert 0 <= saved.pop("router") - parts.pop("router") <= (2 * 8 + 1) * FP32_BYTES
    copies, attention = saved.pop("copies"), te_on_ranks.copies_of(job, "attention")
    assert saved == {item: size for item, size in parts.items() if size}
    assert copies == fp8_copies_bytes(job, 0) // job.model.layers - attention


BESIDE = MIXTURE | {"filled": True, "overlapped": True}
DELAYED = {"delay_wgrad_compute": True}


@pytest.mark.parametrize(
    ("recipe", "layout", "dispatcher", "model"),
    [
        ("delayed", "TP2+SP, EP2", "alltoall", {}),
        *long(
            ("mxfp8", "EP2", "alltoall", DELAYED),
            ("tensorwise", "TP2+SP, EP2", "alltoall", DELAYED),
            ("blockwise", "EP2", "deepep", {}),
            ("mxfp8", "EP2", "hybridep", {}),
        ),
    ],
)
def test_beside_overlapped_exchanges(pool_of, recipe, layout, dispatcher, model):
    job = job_of(recipe, layout, experts=BESIDE | {"dispatcher": dispatcher})
    everything = plan_for(job, lambda layer: recomputable(job), windows=False)
    activation = plan_for(job, lambda layer: ("experts_activation",), windows=False)
    candidates = [everything, activation, checkpointed(everything, "attention")]
    checked(pool_of, job, candidates, Trial(canaries=True, steps=2, model=model))


@pytest.mark.parametrize("recipe", long("delayed", "mxfp8"))
def test_latent_attention_beside_overlapped_exchanges(pool_of, recipe):
    job = latent_job(recipe, "EP2", experts=BESIDE, qk_norm=True)
    candidates = [experts_plan(job, ("experts_fc1", "experts_activation")), checkpointed(experts_plan(job, ()), "attention")]
    checked(pool_of, job, candidates, Trial(canaries=True, steps=2))


@pytest.mark.parametrize("recipe", ["delayed"])
def test_rows_of_a_single_expert_are_freed_beside_overlapped_exchanges(pool_of, recipe):
    """At planning, too."""
    job = job_of(recipe, "EP2", experts=BESIDE | {"count": 2})
    with pytest.raises(ConfigError, match="needed several experts on each rank, or no FP8"):
        check_plannable(job)
    plan = plan_for(job, lambda layer: ("experts_activation",), windows=False)
    with pytest.raises(RankError, match=r"config\.num_moe_experts: found 2 over 2 ranks, needed several"):
        checked(pool_of, job, [plan])


def experts_plan(job: Job, recompute: Collection[str]) -> Plan:
    """Of a model with latent attention and experts."""
    usual = job.model_copy(update={"model": job.model.model_copy(update={"latent": None})})
    raw, section = plan_for(usual, lambda _: recompute, windows=False).model_dump(), job.model.halves["attention"]
    assert job.model.latent is not None
    raw["model"]["latent_attention"] = job.model.latent.model_dump()
    for rule in (rule for stage in raw["stages"] for rule in stage["rules"]):
        others = [item for item in rule["keep"] if item not in ATTENTION.names]
        rule["keep"] = [*section.names, *others]
    return Plan.model_validate(raw)


def latent_job(recipe: str, layout: str, **fields: Any) -> Job:
    ranks = {"q_rank": 128, "kv_rank": 128} if recipe == "blockwise" and "SP" in layout else {}
    return job_of(recipe, layout, latent=LATENT | ranks, kv_groups=4, position="rope", **fields)


@pytest.mark.parametrize(
    ("recipe", "layout", "fields"),
    [
        ("delayed", "TP2+SP", {"qk_norm": True}),
        ("mxfp8", "one rank", {"qk_norm": True}),
        *long(
            ("blockwise", "PP2", {}),
            ("tensorwise", "one rank", {"qk_norm": True}),
            ("blockwise", "TP2+SP", {"qk_norm": True}),
            ("mxfp8", "TP2+SP", {"qk_norm": True}),
            ("nvfp4", "TP2+SP", {"qk_norm": True}),
            ("nvfp4", "PP2", {}),
            ("tensorwise", "TP2+SP", {"qk_norm": True}),
            ("delayed", "PP2", {}),
        ),
    ],
)
def test_latent_attention(pool_of, recipe, layout, fields):
    job = latent_job(recipe, layout, **fields)
    everything = all_of(job)
    candidates = [latent_plan(job, together(job, everything)), latent_plan(job, ("input_layernorm",))]
    checked(pool_of, job, candidates, Trial(steps=3))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_bytes_of_latent_attention(pool_of, recipe):
    job = latent_job(recipe, "TP2+SP", like="gpt", norm="rmsnorm", attention_dropout=0.0, hidden_dropout=0.0, qk_norm=True)
    for seen in pool_of(job.gpus).run(te_on_ranks.saved_bytes, job):
        assert seen == te_on_ranks.predicted_bytes(job)


@pytest.mark.long
@pytest.mark.parametrize(("release", "core"), [("2.14", "0.17"), ("2.20", "0.18"), ("2.17", "0.19")])
def test_other_releases(release, core):
    with pool_with(release, 2, core) as pool:
        for recipe, filled in (("delayed", False), ("blockwise", True)):
            job = job_of(recipe, "EP2", experts=MIXTURE | {"filled": filled})
            plan = plan_for(job, lambda layer, job=job: recomputable(job), windows=False)
            training = {"ddp": True, "optimizer": "megatron"}
            checked(lambda _: pool, job, [plan], Trial(steps=2, training=training, model={"moe_grouped_gemm": True}))
        job = latent_job("delayed", "TP2+SP", qk_norm=True)
        checked(lambda _: pool, job, [latent_plan(job, together(job, all_of(job)))], Trial(steps=2))
