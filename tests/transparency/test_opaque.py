"""Layers one half of which nobody looks into equal stock in every bit, while everything else of them is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import stage_parameters
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.checkpoints import checkpointed
from tests.transparency.offloaded import offloading
from tests.transparency.opaque_layers import compare, held_and_parameters, own_attention_in, refused
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

EXPERTS = {"count": 4, "per_token": 2, "ffn": 32, "shared_ffn": 32, "shared_gate": True, "layers": [2, 4]}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2, "experts": None},  # experts beside tensor-parallel ranks need sequence parallelism
    "TP2+SP": {"tensor": 2, "sequence_parallel": True},
    "PP2": {"pipeline": 2, "microbatches": 4},
    "PP2xVPP2": {"pipeline": 2, "microbatches": 4, "layers_per_chunk": 1},
}


@pytest.fixture(scope="module")
def pool_of() -> Iterator[Any]:
    pools: dict[int, RankPool] = {}
    yield lambda ranks: pools.setdefault(ranks, RankPool(ranks))
    for pool in pools.values():
        pool.close()


def job_of(layout: str, **model: Any) -> Job:
    """A fork's attention, the usual one, two of the fork's; every second layer has experts whose shared ones have a gate."""
    fields: dict[str, Any] = {"opaque": own_attention_in([1, "3-4"]), "experts": EXPERTS}
    return tiny_job("llama", **{**fields, **LAYOUTS[layout], **model}, hidden_dropout=0.1)


@pytest.mark.parametrize("layout", ["TP2+SP", "PP2xVPP2", *long("one rank", "TP2", "PP2")])
def test_every_bit(pool_of: Any, layout: str) -> None:
    job = job_of(layout)
    kept, everything = uniform_plan(job, "none"), uniform_plan(job, gather="once")
    halves = checkpointed(checkpointed(kept, "halves", [2]), "mlp", [1, 3, 4])
    candidates = [kept, everything, halves, offloading(uniform_plan(job), 8_000, experts=True)]
    assert [str(span) for span in kept.model.opaque_layers["own_attention"]] == ["1", "3-4"]
    for outcomes in pool_of(job.gpus).run(compare, job, candidates, Trial(canaries=True)):
        assert [outcome.differing for outcome in outcomes] == [[]] * len(candidates)
        assert [outcome.planned.frames_left for outcome in outcomes] == [0] * len(candidates)
        assert all(outcome.planned.counts[-1].recomputed > 0 for outcome in outcomes[1:3])


def test_weight_gradients_in_waits(pool_of: Any) -> None:
    job = job_of("TP2")
    trial = Trial(training={"ddp": True}, model={"gradient_accumulation_fusion": True})
    for [outcome] in pool_of(2).run(compare, job, [deferring(uniform_plan(job))], trial):
        assert outcome.differing == []
        assert outcome.planned.counts[-1].filled > 0


def test_a_plan_for_other_layers_is_refused(pool_of: Any) -> None:
    usual = uniform_plan(tiny_job("llama", hidden_dropout=0.1, experts=EXPERTS))
    said = pool_of(1).run(refused, job_of("one rank"), usual)[0]
    assert "plan: model.opaque_layers: layers 1, 3, 4" in said
    assert "own_attention in this run alone" in said


def test_no_hook_is_on_what_nobody_looks_into(pool_of: Any) -> None:
    """And its parameters are as many as priced."""
    job = job_of("one rank", experts=None)
    [(held, parameters)] = pool_of(1).run(held_and_parameters, job, uniform_plan(job))
    halves = {f"layer {layer}._forward_{half}" for layer in range(1, 5) for half in ("attention", "mlp")}
    assert halves - set(held) == {f"layer {layer}._forward_attention" for layer in (1, 3, 4)}
    assert parameters == stage_parameters(job, 0).total
