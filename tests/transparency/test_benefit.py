"""What a window is for: every task that a plan puts into one runs between the issue of what it hides and the wait for it.

Nothing else shows that. With tasks behind the wait, or a collective that is waited for before its window, every gradient is
stock's, every count is what the plan says, and a step takes as long as if all were recomputed on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.testbed.ranks import RankPool
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.test_deferring_experts import LINEARS, plans, with_shared
from tests.transparency.test_experts import job_of
from tests.transparency.timeline import OUTSIDE, Timeline, timelines

Pools = Callable[[int], RankPool]
FUSED = {"gradient_accumulation_fusion": True}


def checked(pool_of: Pools, job: Job, plans: Sequence[Plan], model: dict[str, Any] = FUSED) -> list[Timeline]:
    """One step of each rank under each plan, in which every task hides something."""
    found = pool_of(job.gpus).run(timelines, job, list(plans), {"ddp": True}, model)
    for rank, timeline in ((rank, timeline) for rank, of_rank in enumerate(found) for timeline in of_rank):
        for task in timeline.tasks:
            assert timeline.window_of(task), f"rank {rank}: {task} in {task.window} runs beside nothing"
        for gather in timeline.gathers:
            assert timeline.beside(gather), f"rank {rank}: {gather} behind {gather.window} is waited for at once"
    return [timeline for of_rank in found for timeline in of_rank]


OF_SEQUENCE_PARALLELISM = {
    f"{place.replace('half', half)}": work
    for half in ("attention", "mlp")
    for place, work in {
        "fwd.half.0": "all_gather_single",
        "fwd.half.1": "reduce_scatter_single",
        "bwd.half.0": "all_gather_single",
        "bwd.half.1": "all_gather_single",
        "bwd.half.2": "reduce_scatter_single",
    }.items()
}
"""What each window waits for."""


def windows_of(timelines: Sequence[Timeline], what: str) -> set[str]:
    """The kinds of windows in which tasks of a kind ran."""
    events = (event for one in timelines for event in one.events if event.what == what and event.window not in OUTSIDE)
    return {event.window.partition("@")[0] for event in events}


def works_in(timelines: Sequence[Timeline]) -> dict[str, str]:
    """What the tasks of each kind of window run beside."""
    found = {task.window.partition("@")[0]: one.window_of(task)[0] for one in timelines for task in one.tasks}
    return {window: issued.removeprefix("issued ") for window, issued in found.items()}


def weight_gradients(kept: Plan, waits: Sequence[str], linears: Sequence[str] = ()) -> list[Plan]:
    """A plan for each kind of wait, in which everything that can be is deferred into this one alone."""
    return [deferring(kept, linears, lambda name, wait=wait: name.startswith(wait)) for wait in waits]  # type: ignore[misc]


def kept(job: Job) -> Plan:
    return plan_for(job, lambda layer: ())


def collectives(forward: int, backward: int) -> list[str]:
    """The windows of a layer with so many collectives in each half."""
    numbers = {"fwd": forward, "bwd": backward}
    return [f"{passing}.{half}.{n}" for passing in numbers for half in ("attention", "mlp") for n in range(numbers[passing])]


@pytest.mark.quick
def test_a_recomputation_hides_a_reduction(pool_of: Pools) -> None:
    """Written out. Local layers reduce with `torch.distributed.all_reduce`."""
    job = tiny_job("llama", tensor=2, layers=2, microbatches=1)
    [timeline, _] = checked(pool_of, job, [plan_for(job, lambda layer: recomputable(job))])
    assert [(task.window, timeline.window_of(task)) for task in timeline.tasks] == [
        ("bwd.mlp.0@2", ["issued allreduce", "recompute attention(2)", "waited allreduce"]),
        ("bwd.attention.0@2", ["issued allreduce", "recompute mlp(1)", "waited allreduce"]),
        ("bwd.mlp.0@1", ["issued allreduce", "recompute attention(1)", "waited allreduce"]),
    ]


def test_weight_gradients_hide_reductions(pool_of: Pools) -> None:
    job = tiny_job("llama", tensor=2, layers=2)
    waits = collectives(1, 1)
    assert windows_of(checked(pool_of, job, weight_gradients(kept(job), waits)), "weight gradient") == {*waits}


def test_every_collective_of_sequence_parallelism(pool_of: Pools) -> None:
    """Gathers and scatters of both halves in both passes; and what is gathered behind a window is on its way beside others."""
    job = tiny_job("llama", tensor=2, layers=2, sequence_parallel=True)
    waits = collectives(2, 3)
    found = checked(
        pool_of, job, [plan_for(job, lambda layer: recomputable(job, gather=True)), *weight_gradients(kept(job), waits)]
    )
    assert windows_of(found, "weight gradient") == {*waits}
    assert windows_of(found, "recompute") == {"bwd.attention.2", "bwd.mlp.2"}
    assert windows_of(found, "gather") == {"bwd.attention.0", "bwd.mlp.0"}
    assert works_in(found) == OF_SEQUENCE_PARALLELISM


def test_tokens_that_travel(pool_of: Pools) -> None:
    """Exchanges of experts, in both passes."""
    job = with_shared(job_of("EP2", layers=2))
    waits = [f"{passing}.mlp.{n}" for passing in ("fwd", "bwd") for n in range(3)]
    nothing, everything = plans(job)
    first = weight_gradients(nothing, ["fwd.mlp.0", "bwd.mlp.0"], LINEARS)
    later = [plan.model_dump_json().replace(".mlp.0", f".mlp.{n}") for plan in first for n in (1, 2)]
    found = checked(pool_of, job, [everything, *first, *map(Plan.model_validate_json, later)])
    assert windows_of(found, "recompute") == {"bwd.mlp.0", "bwd.mlp.2"}
    assert windows_of(found, "weight gradient") == {*waits}


@pytest.mark.parametrize("layout", [{}, {"layers_per_chunk": 1}], ids=["1F1B", "interleaved"])
def test_gradients_that_are_received(pool_of: Pools, layout: dict[str, int]) -> None:
    """1F1B posts its messages in one batch and waits at once; interleaved schedules post them alone, long before."""
    job = tiny_job("llama", pipeline=2, microbatches=4, **layout)
    found = checked(pool_of, job, [plan_for(job, lambda layer: recomputable(job)), *weight_gradients(kept(job), [RECV_BACKWARD])])
    assert windows_of(found, "recompute") == windows_of(found, "weight gradient") == {RECV_BACKWARD}
