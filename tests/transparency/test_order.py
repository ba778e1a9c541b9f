"""Which frame ran in which window: as the plan says, and the same on every rank of the tensor-parallel group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for, recomputable
from tests.transparency.trials import Trial, compare_with_stock

Pools = Callable[[int], RankPool]


def recomputations_seen(pool_of: Pools, job: Job, plan: Plan) -> list[list[tuple[Any, ...]]]:
    """Per rank, (micro-batch, layer, half, window) of every recomputation of one step, in the order in which they ran."""
    results = pool_of(job.gpus).run(compare_with_stock, job, [plan], Trial(steps=1, traced=True))
    timelines = []
    for outcomes in results:
        assert outcomes[0].differing == []
        events = [event for event in outcomes[0].planned.events if event["kind"] == "recompute"]
        timelines.append([(event["micro_batch"], event["layer"], event["half"], event["window"]) for event in events])
    return timelines


def planned_windows(job: Job, plan: Plan, stage_number: int) -> set[tuple[Any, ...]]:
    (halves,) = timetable_of(plan, stage_number).chunks
    return {(micro_batch, *half.key, str(half.stretches[-1][0])) for micro_batch in range(job.microbatches) for half in halves}


@pytest.mark.quick
def test_one_frame_ahead(pool_of: Pools) -> None:
    """Written out for two layers: each half hides behind the reduction of the half that backward runs before it."""
    job = tiny_job("llama", tensor=2, layers=2, microbatches=1)
    timelines = recomputations_seen(pool_of, job, plan_for(job, lambda layer: recomputable(job)))
    assert timelines[0] == [
        (0, 2, "mlp", "on_demand"),
        (0, 2, "attention", "bwd.mlp.0@2"),
        (0, 1, "mlp", "bwd.attention.0@2"),
        (0, 1, "attention", "bwd.mlp.0@1"),
    ]
    assert timelines[1] == timelines[0]


def test_own_window_under_sequence_parallelism(pool_of: Pools) -> None:
    """The gathering of a half's own gradient hides its own recomputation: not even the first frame is exposed."""
    job = tiny_job("llama", tensor=2, sequence_parallel=True, layers=2, microbatches=1)
    plan = plan_for(job, lambda layer: [item for item in recomputable(job) if not item.endswith("bda")])
    assert recomputations_seen(pool_of, job, plan)[0][0] == (0, 2, "mlp", "bwd.mlp.0@2")


@pytest.mark.quick
def test_phases_of_a_pipeline(pool_of: Pools) -> None:
    """No window of a backward comes before its first frame: the receive of its gradient hides it."""
    job = tiny_job("llama", tensor=2, pipeline=2, microbatches=3)
    plan = plan_for(job, lambda layer: recomputable(job))
    timelines = recomputations_seen(pool_of, job, plan)
    first_frames = [recompute for recompute in timelines[0] if recompute[1:3] == (2, "mlp")]
    assert first_frames == [
        (0, 2, "mlp", "pipe.recv_backward"),
        (1, 2, "mlp", "pipe.recv_backward"),
        (2, 2, "mlp", "pipe.recv_backward"),
    ]
    for rank, timeline in enumerate(timelines):
        assert set(timeline) == planned_windows(job, plan, rank // 2)
    assert timelines[0] == timelines[1]
    assert timelines[2] == timelines[3]


def test_gathers_come_behind_their_window(pool_of: Pools) -> None:
    job = tiny_job("llama", tensor=2, sequence_parallel=True, layers=2, microbatches=1)
    plan = plan_for(job, lambda layer: recomputable(job, gather=True))
    results = pool_of(2).run(compare_with_stock, job, [plan], Trial(steps=1, traced=True))
    for outcomes in results:
        events = outcomes[0].planned.events
        for gather in (event for event in events if event["kind"] == "gather"):
            window = next(event for event in events if event["kind"] == "window" and event["window"] == gather["window"])
            half = (gather["layer"], gather["half"])
            recompute = next(
                event for event in events if event["kind"] == "recompute" and (event["layer"], event["half"]) == half
            )
            assert window["end_s"] <= gather["start_s"] < gather["end_s"] <= recompute["start_s"]


def test_every_kind_of_window_hides_something(pool_of: Pools) -> None:
    """With sequence parallelism and a pipeline there are seven kinds. Each is given a frame, and each runs it."""
    job = tiny_job("llama", tensor=2, pipeline=2, sequence_parallel=True, microbatches=3)
    kinds: set[str] = set()
    for backward in range(3):
        raw = plan_for(job, lambda layer: recomputable(job)).model_dump(mode="json")
        first, second = raw["stages"][0]["rules"]
        second["windows"]["mlp"] = "pipe.recv_backward"
        second["windows"]["attention"] = f"bwd.mlp.{backward}"
        first["windows"]["mlp"] = f"bwd.attention.{backward}+1"
        kinds |= {window.partition("@")[0] for *_, window in recomputations_seen(pool_of, job, Plan.model_validate(raw))[0]}
    backwards = {f"bwd.{half}.{ordinal}" for half in ("attention", "mlp") for ordinal in range(3)}
    assert kinds == backwards | {"pipe.recv_backward"}
