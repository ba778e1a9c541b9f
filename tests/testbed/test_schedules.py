"""With and without flushes on real ranks, against the version rule."""

from __future__ import annotations

from benchmarks.schedules import Way, differing, time_ways
from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan


def test_trained_ways_are_what_they_are_said_to_be() -> None:
    """Without flushes: the version rule's weights to the bit; with flushes they differ from it. Both have their times."""
    job = tiny_job("gpt", pipeline=2, microbatches=2)
    planned = uniform_plan(job.model_copy(update={"schedule": "double_buffered"}))
    ways = [(Way("planned", True, planned), True), (Way("at once", False), True), (Way("flush"), False)]
    with RankPool(2) as pool:
        for way, same in ways:
            assert all((found == []) == same for found in pool.run(differing, job, way, 4)), way.name
        laps = pool.run(time_ways, job, [Way("flush"), Way("deferred", True)], 2, 4)
    assert all(len(lap[name].batch_s) == 2 and lap[name].update_s > 0 for lap in laps for name in ("flush", "deferred"))


def test_an_unflushed_plan_has_no_forward_windows() -> None:
    job = tiny_job("gpt", tensor=2, pipeline=2, microbatches=2).model_copy(update={"schedule": "double_buffered"})
    plan = uniform_plan(job)
    assert plan.schedule == "double_buffered"
    windows = [window for stage in plan.stages for rule in stage.rules for window in rule.windows.model_dump().values()]
    assert "pipe.recv_backward" in windows
    assert not any("fwd." in str(window) for window in windows)
