"""Gated delta nets whose items are recomputed, offloaded and checkpointed equal stock in every bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import parameter_tensors, stage_parameters
from megatron_lynx.kinds.mamba.section import CONVOLUTION, DELTA_NET, GATED_NORM, IN_PROJ, OUT_PROJ, RULE
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.kinds.on_ranks import measured_delta_net
from tests.long import long
from tests.te_releases import pool_with, pools_with
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import ahead, checkpointed
from tests.transparency.offloaded import offloading
from tests.transparency.opaque_layers import compare, delta_net_in, refused
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32, "shared_gate": True, "layers": [2, 4]}
TE = {"implementation": "transformer_engine"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2, "experts": None},  # experts beside tensor-parallel ranks need sequence parallelism
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "TP2+SP, TE": {"tensor": 2, "sequence_parallel": True, **TE},
    "PP2": {"pipeline": 2, "microbatches": 4},
    "PP2xVPP2, TE": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1, **TE},
}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Any]:
    yield from pools_with("2.17", core="0.19")


def job_of(layout: str, **model: Any) -> Job:
    """A delta net, an attention, two delta nets; every second layer has experts whose shared ones have a gate."""
    fields: dict[str, Any] = {"opaque": delta_net_in([1, "3-4"]), "experts": EXPERTS}
    return tiny_job("llama", **{**fields, **LAYOUTS[layout], **model}, hidden_dropout=0.1)


@pytest.mark.parametrize("layout", ["TP2+SP", *long("PP2xVPP2, TE", "one rank", "TP2", "TP2+SP, TE", "PP2")])
def test_every_bit(pool_of: Any, layout: str) -> None:
    job = job_of(layout)
    kept, everything = uniform_plan(job, "none"), uniform_plan(job, gather="once")
    whole = checkpointed(kept, "layer", [1, 2, 3])
    candidates = [
        kept,
        everything,
        uniform_plan(job, (CONVOLUTION, GATED_NORM)),
        uniform_plan(job, (RULE,)),
        checkpointed(checkpointed(kept, "halves", [2, 3]), "mlp", [1, 4]),
        whole if job.parallel.tensor == 1 else ahead(whole),
        offloading(uniform_plan(job, (GATED_NORM,)), 8_000, experts=True),
    ]
    assert everything.model.opaque_layers.keys() == {DELTA_NET.name}
    of_ranks = pool_of(job.gpus).run(compare, job, candidates, Trial(canaries=True))
    assert job.gpus == 1 or any(outcomes[1].planned.counts[-1].in_windows for outcomes in of_ranks)
    for outcomes in of_ranks:
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(candidates)
        assert all(outcome.planned.counts[-1].recomputed > 0 for outcome in outcomes[1:])


def test_the_rule_in_eager_operators(pool_of: Any) -> None:
    """As deterministic runs have it."""
    job = job_of("one rank", deterministic=True, experts=None)
    candidates = [uniform_plan(job), uniform_plan(job, (CONVOLUTION,)), uniform_plan(job, (RULE, GATED_NORM))]
    [outcomes] = pool_of(1).run(compare, job, candidates, Trial(canaries=True))
    assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)


def test_weight_gradients_in_waits(pool_of: Any) -> None:
    job = job_of("TP2")
    plan = deferring(uniform_plan(job), (IN_PROJ, OUT_PROJ))
    assert {IN_PROJ, OUT_PROJ} == plan.stages[0].rules[0].weight_gradients.keys()
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True})
    for [outcome] in pool_of(2).run(compare, job, [plan], trial):
        assert outcome.differing == []
        assert outcome.planned.counts[-1].filled > 0


@pytest.mark.long
def test_megatron_0_18(pool_of: Any) -> None:
    job = job_of("TP2")
    candidates = [uniform_plan(job), uniform_plan(job, (CONVOLUTION, GATED_NORM))]
    with pool_with("2.17", 2, core="0.18") as pool:
        for outcomes in pool.run(compare, job, candidates, Trial(canaries=True)):
            assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)


def test_a_release_whose_rule_has_no_hook_keeps_it() -> None:
    """0.16 and 0.17 call the rule by a global name."""
    job = job_of("one rank", experts=None)
    around = ("input_layernorm", "pre_mlp_layernorm")
    with RankPool(1) as pool:
        [said] = pool.run(refused, job, uniform_plan(job))
        assert "delta_rule.gated_delta_rule: found nothing, needed a function" in said
        [[kept]] = pool.run(compare, job, [uniform_plan(job, around[1:])], Trial())
        assert kept.differing == []


@pytest.mark.parametrize(("norm", "core"), [("rmsnorm", "0.19"), ("layernorm", "0.19"), ("rmsnorm", "0.20")])
def test_a_real_half_keeps_and_computes_what_its_shape_says(pool_of: Any, norm: str, core: str) -> None:
    job = tiny_job("llama", opaque=delta_net_in(["1-4"]), seq=128, norm=norm)  # type: ignore[arg-type]
    with nullcontext(pool_of(1)) if core == "0.19" else pool_with("2.20", 1, core=core) as pool:
        [(tensors, flops, numbers, parameters)] = pool.run(measured_delta_net, job)
    shape, face = LayerShape.of(job), planning_of(DELTA_NET)

    def made_by(one: SavedTensor) -> str:
        gate = one.saved_by == (GATED_NORM,) and not one.output and one.made_by == RULE  # passes the rule unseen
        return CONVOLUTION if gate else one.made_by

    priced, counted = (
        Counter((made_by(one), one.saved_by, one.bytes, one.output) for one in every) for every in (face.tensors(shape), tensors)
    )
    if core == "0.20":  # the rule reads a copy of the steps of several sequences: e a bytes more per token
        [step] = (one for one in priced if one[1] == (CONVOLUTION, RULE))
        priced = priced - Counter([step]) + Counter([(*step[:1], (one,), *step[2:]) for one in step[1]])
    assert counted == priced
    assert {item: flops[item] for item in face.linears(shape)} == {item: face.flops(shape)[item] for item in face.linears(shape)}
    assert (numbers, parameters) == (stage_parameters(job, 0).total, parameter_tensors(job, 0).total)


def test_eager_operators_keep_what_is_priced(pool_of: Any) -> None:
    """In deterministic mode, where the kernels were priced instead."""
    job = tiny_job("llama", opaque=delta_net_in(["1-4"]), seq=128, deterministic=True)
    [(tensors, *_)] = pool_of(1).run(measured_delta_net, job)
    priced = [tensor for tensor in planning_of(DELTA_NET).tensors(LayerShape.of(job)) if tensor.saved_by]
    counted = sum(tensor.bytes for tensor in tensors if tensor.saved_by)
    assert counted == pytest.approx(sum(tensor.bytes for tensor in priced), rel=0.02)
