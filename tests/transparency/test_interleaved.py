"""Interleaved schedules: every way of exchanging gradients, windows of other chunks. And micro-batches kept whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.cost.on_ranks import count
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_every_bit import checked
from tests.transparency.trials import Trial
from tests.uniform import uniform_plan

Pools = Callable[[int], RankPool]

ONE_CALL = {"overlap_p2p_comm": False}
FLUSHED = {"overlap_p2p_comm_warmup_flush": True}
VARIANTS: dict[str, tuple[int, int | None, dict[str, Any]]] = {
    "all of stage 0 is warm-up": (2, None, {}),
    "one call for both directions": (4, None, ONE_CALL),
    "one batched call for both directions": (4, None, {**ONE_CALL, "batch_p2p_comm": True}),
    "received ahead in warm-up and cool-down": (4, None, FLUSHED),
    "groups of three, received ahead": (6, 3, FLUSHED),
    "groups of four and of two, received ahead": (6, 4, FLUSHED),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_exchanging(pool_of: Pools, variant: str) -> None:
    """Each backward but those of the last virtual stage hides its first frame behind the wait for its gradient."""
    microbatches, group, fields = VARIANTS[variant]
    job = tiny_job("gpt", pipeline=2, layers_per_chunk=1, microbatches=microbatches, microbatch_group=group)
    plan = plan_for(job, lambda layer: recomputable(job))
    outcomes = checked(pool_of, job, [plan], Trial(model=fields))
    assert [rank[0].planned.counts[0].in_windows for rank in outcomes] == [2 * microbatches, microbatches]


def test_gradients_through_the_group_of_all_ranks(pool_of: Pools) -> None:
    """With three stages or more, a plan with recomputations in steady receives sends gradients through another group than
    outputs."""
    job = tiny_job("gpt", pipeline=3, layers=6, layers_per_chunk=1, microbatches=6)
    outcomes = checked(pool_of, job, [plan_for(job, lambda layer: recomputable(job))])
    assert [rank[0].planned.counts[0].in_windows for rank in outcomes] == [12, 12, 6]


def test_reductions_in_backward(pool_of: Pools) -> None:
    """Gradients of two replicas are reduced chunk by chunk, as soon as the last micro-batch has passed."""
    job = tiny_job("gpt", pipeline=2, layers_per_chunk=1, microbatches=2, replicas=2)
    overlapped = {"ddp": True, "overlap_grad_reduce": True, "optimizer": "megatron"}
    checked(pool_of, job, [uniform_plan(job)], Trial(steps=2, training=overlapped))


def test_gradients_that_lie_there_are_no_window(pool_of: Pools) -> None:
    """In groups of four, gradients reach the last stage two backwards early, and in cool-down nothing is waited for right before
    each backward. Such windows are refused; what is left is transparent."""
    job = tiny_job("gpt", pipeline=2, layers_per_chunk=1, microbatches=4, microbatch_group=4)
    raw = plan_for(job, lambda layer: recomputable(job)).model_dump(mode="json")
    raw["stages"][1]["rules"][0]["windows"]["mlp"] = "on_demand"
    checked(pool_of, job, [Plan.model_validate(raw)])


@pytest.mark.parametrize("like", ["gpt", *long("llama")])
def test_a_whole_micro_batch_keeps_all(pool_of: Pools, like: Any) -> None:
    """Of the two micro-batches that stage 0 holds one is whole. Stage 1 holds one: when that is whole, as much as stock. Random
    states are no activations."""
    job = tiny_job(like, pipeline=2, microbatches=4)
    everything, one_of_two = lambda layer: recomputable(job), {"of_every": 2, "first": 1}
    candidates = [None, plan_for(job, everything), plan_for(job, everything, whole=one_of_two)]
    first, second = pool_of(2).run(count, job, candidates)
    slack_bytes = 3 * first[0].state_bytes
    stock, recomputed, mixed = (counted.resident_bytes for counted in first)
    assert stock - recomputed > 10 * slack_bytes
    assert abs(mixed - (stock + recomputed) / 2) <= slack_bytes
    assert abs(second[2].resident_bytes - second[0].resident_bytes) <= slack_bytes
    assert [counted.frames for counted in first] == [0, 2 * 2 * 4, 2 * 2 * 2]
