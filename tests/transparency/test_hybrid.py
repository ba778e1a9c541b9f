"""The hybrid translation of a GPT under the GPT's own plans equals stock in every bit: halves are layers of their own there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from megatron_lynx.cost.parameters import parameter_tensors, stage_parameters
from megatron_lynx.kinds.mamba.section import MAMBA, MAMBA_IN_PROJ, MAMBA_NORM, MAMBA_OUT_PROJ, SCAN
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.apply.on_ranks import reads_otherwise
from tests.deferring import deferring
from tests.long import long
from tests.te_releases import pool_with, pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed
from tests.transparency.hybrid_models import compare_hybrid, mamba_half, pattern_of, refused
from tests.transparency.offloaded import offloading
from tests.transparency.opaque_layers import delta_net_in
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2, "microbatches": 4},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Pools]:
    yield from pools_with("2.17", core="0.19", TESTBED_STAND_INS="tests.instruments.mamba")


def hybrid_job(**fields: Any) -> Any:
    return tiny_job("llama", implementation="transformer_engine", **fields)


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2", *long("PP2")])
def test_every_bit(pool_of: Pools, layout: str) -> None:
    job = hybrid_job(**LAYOUTS[layout])
    kept, everything = plan_for(job, lambda layer: ()), plan_for(job, lambda layer: recomputable(job, gather=True))
    mixed = plan_for(job, lambda layer: recomputable(job) if layer % 2 else ())
    candidates = [kept, everything, mixed, checkpointed(kept, "layer"), checkpointed(kept, "mlp"), offloading(mixed, 8_000)]
    for outcomes in pool_of(job.gpus).run(compare_hybrid, job, candidates, Trial(canaries=layout == "TP2+SP")):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(candidates)
        assert outcomes[1].planned.counts[-1].in_windows > 0 or job.parallel.tensor * job.chunks == 1


def test_experts_of_a_latent_width_are_kept_whole(pool_of: Pools) -> None:
    """As Nemotron 3 Super has them: everything around them is recomputed."""
    experts = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32, "latent": 16, "whole": True, "layers": 2}
    job = hybrid_job(**LAYOUTS["TP2+SP"], experts=experts, bias=False)
    dense = recomputable(job)
    around = [item for item in dense if not item.startswith(("pre_mlp", "mlp", "shared", "experts"))]
    candidates = [plan_for(job, lambda layer: around if layer in job.model.expert_layers else dense)]
    candidates += [plan_for(job, lambda layer: ()), offloading(candidates[0], 8_000)]
    for outcomes in pool_of(2).run(compare_hybrid, job, candidates, Trial(canaries=True, model={"moe_latent_size": 16})):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert outcomes[0].planned.counts[-1].recomputed > 0


def test_weight_gradients_in_waits(pool_of: Pools) -> None:
    job = hybrid_job(**LAYOUTS["TP2+SP"])
    plan = deferring(plan_for(job, lambda layer: recomputable(job, gather=True)))
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True})
    for [outcome] in pool_of(2).run(compare_hybrid, job, [plan], trial):
        assert outcome.differing == []
        assert outcome.planned.counts[-1].filled == outcome.planned.counts[-1].deferred > 0


EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "layers": [3, 6]}
MAMBA_SIZES = {"heads": 4, "size": 8, "groups": 2, "state": 8}
OPAQUE = [
    {"kind": "mamba", "layers": [1, 4, 6], "mamba": MAMBA_SIZES},
    {"kind": "no_attention", "layers": [2]},
    {"kind": "no_mlp", "layers": [4]},
]


@pytest.mark.parametrize("layout", ["PP2", *long("TP2+SP")])
def test_stacks_with_mamba_layers(pool_of: Pools, layout: str) -> None:
    """M- - *E, M *- ME: Mamba layers, experts, attentions and MLPs, and halves without the other one."""
    job = hybrid_job(**LAYOUTS[layout], layers=6, experts=EXPERTS, opaque=OPAQUE, hidden_dropout=0.1)
    assert pattern_of(job).replace("|", "") == "M--*EM*-ME"
    kept, everything = uniform_plan(job, "none"), uniform_plan(job, gather="once")
    candidates = [
        kept,
        everything,
        uniform_plan(job, (SCAN, MAMBA_NORM)),
        uniform_plan(job, (MAMBA_NORM,)),
        checkpointed(kept, "mlp", [1, 2, 3, 5, 6]),
        checkpointed(kept, "attention", [1, 3, 4, 5, 6]),
        checkpointed(kept, "layer", [1, 3, 5, 6]),
        offloading(uniform_plan(job, (MAMBA_NORM,)), 8_000, experts=True),
    ]
    of_ranks = pool_of(job.gpus).run(compare_hybrid, job, candidates, Trial(canaries=layout == "TP2+SP"))
    assert any(outcomes[1].planned.counts[-1].in_windows for outcomes in of_ranks)
    for outcomes in of_ranks:
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(candidates)
        assert all(outcome.planned.counts[-1].recomputed > 0 for outcome in outcomes[1:2])


def test_stacks_with_gated_delta_nets(pool_of: Pools) -> None:
    """G- *E G: the layers of `pretrain_hybrid.py`."""
    opaque = [*delta_net_in([1, 3]), {"kind": "no_mlp", "layers": [3]}]
    job = hybrid_job(**LAYOUTS["TP2+SP"], layers=3, experts=EXPERTS | {"layers": [2]}, opaque=opaque, hidden_dropout=0.1)
    assert pattern_of(job) == "G-*EG"
    kept, everything = uniform_plan(job, "none"), uniform_plan(job, gather="once")
    candidates = [kept, everything, checkpointed(kept, "attention"), offloading(kept, 8_000)]
    for outcomes in pool_of(2).run(compare_hybrid, job, candidates, Trial(canaries=True)):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert all(outcome.planned.counts[-1].recomputed > 0 for outcome in outcomes[1:3])


@pytest.mark.parametrize(("core", "recipe"), [("0.19", "tensorwise"), *long(("0.19", "delayed"), ("0.18", None))])
def test_mamba_layers_in_fp8_and_in_another_release(core: str, recipe: str | None) -> None:
    sizes = {"heads": 16, "size": 4, "groups": 2, "state": 8}  # FP8 needs a first linear of multiples of 16
    opaque = [{"kind": "mamba", "layers": [1, 2], "mamba": sizes}]
    fp8 = None if recipe is None else {"recipe": recipe}
    job = hybrid_job(**LAYOUTS["TP2+SP"], layers=2, dtype="bf16", fp8=fp8, opaque=opaque)
    kept = uniform_plan(job, "none")
    candidates = [uniform_plan(job, gather="once"), uniform_plan(job, (SCAN, MAMBA_NORM)), checkpointed(kept, "layer", [1])]
    with pool_with("2.17", 2, core=core, TESTBED_STAND_INS="tests.instruments.mamba") as pool:
        for outcomes in pool.run(compare_hybrid, job, candidates, Trial(canaries=True)):
            assert [(outcome.differing, outcome.planned.frames_left) for outcome in outcomes] == [([], 0)] * len(candidates)


def test_weight_gradients_of_mamba_layers_in_waits(pool_of: Pools) -> None:
    job = hybrid_job(tensor=2, sequence_parallel=True, layers=6, opaque=OPAQUE)
    plan = deferring(uniform_plan(job), (MAMBA_IN_PROJ, MAMBA_OUT_PROJ))
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True})
    for [outcome] in pool_of(2).run(compare_hybrid, job, [plan], trial):
        assert outcome.differing == []
        assert outcome.planned.counts[-1].filled > 0


def test_a_captured_mamba_layer_is_kept_whole() -> None:
    """Beside it, `attn` captures attention alone."""
    captured = {name: hybrid_job(layers=6, opaque=OPAQUE, captured=(name,)).model.sections(1)[0] for name in ("mamba", "attn")}
    assert (captured["mamba"].kept_whole, captured["attn"].kept_whole) == (True, False)


@pytest.mark.parametrize("micro", [1, 2])
def test_a_mamba_layer_keeps_and_computes_what_its_shape_says(pool_of: Pools, micro: int) -> None:
    job = hybrid_job(layers=1, seq=64, micro=micro, opaque=[OPAQUE[0] | {"layers": [1]}, {"kind": "no_mlp", "layers": [1]}])
    [(tensors, parameters)] = pool_of(1).run(mamba_half, job)
    expected = planning_of(MAMBA).tensors(LayerShape.of(job))
    priced, counted = (Counter((one.made_by, one.saved_by, one.bytes) for one in every) for every in (expected, tensors))
    assert counted == priced
    assert parameters == (stage_parameters(job, 0).total, parameter_tensors(job, 0).total)


def test_another_stack_is_refused(pool_of: Pools) -> None:
    job = hybrid_job(layers=2)
    [said] = pool_of(1).run(refused, job, plan_for(job, lambda layer: ()), "**--")
    assert "layers: found 1-2, needed 1-3, as this rank has them" in said
    assert "plan: model.opaque_layers: layers 1: found no_mlp in this run alone" in said
    rewritten = partial(reads_otherwise, what="hybrid")
    [said] = pool_of(1).run(refused, job, plan_for(job, lambda layer: ()), pattern_of(job), rewritten)
    assert "code that hooks rely on does not read as recorded" in said
