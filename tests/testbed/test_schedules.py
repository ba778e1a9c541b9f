"""With and without flushes, side by side: real ranks against the version rule, and the simulated rows."""

from __future__ import annotations

import pytest

from benchmarks.schedules import Way, differing, time_ways
from megatron_lynx.planner import make_plan, uniform_plan
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.search.schedules import side_by_side
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.config.jobs import catalogued_job


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


@pytest.fixture(scope="module")
def rows():
    layout = {"tensor": 2, "pipeline": 4, "sequence_parallel": True, "distributed_optimizer": True}
    job = catalogued_job(
        "llama-7b", "a100-80g", gpus=8, batch=4, seq=4096, parallel=layout, policy="planned", schedule="double_buffered"
    )
    profile = analytic_profile(job)
    return {row.setting: row for row in side_by_side(job, make_plan(job, profile), profile)}


def test_simulated_rows(rows) -> None:
    assert [row.without_flushes for row in rows.values()] == [False, False, False, True, True]
    flush, without = rows["stock none, flush"], rows["no recomputation, without flushes"]
    assert flush.ratio_to_none == 1.0
    assert without.step_s < flush.step_s
    assert without.memory_bytes > flush.memory_bytes
    assert without.ratio_to_none == pytest.approx(without.step_s / flush.step_s)


def test_gradients_are_not_said_to_be_stocks(rows) -> None:
    said = {name: row.as_json for name, row in rows.items()}
    assert [row["gradient_age_updates"] for row in said.values()] == [0, 0, 0, 1, 1]
    assert said["ours, without flushes"]["gradients_equal"] is None
    assert rows["ours, without flushes"].gradients.startswith("one update old, by design")


def test_an_unflushed_plan_has_no_forward_windows() -> None:
    job = tiny_job("gpt", tensor=2, pipeline=2, microbatches=2).model_copy(update={"schedule": "double_buffered"})
    plan = uniform_plan(job)
    assert plan.schedule == "double_buffered"
    windows = [window for stage in plan.stages for rule in stage.rules for window in rule.windows.model_dump().values()]
    assert "pipe.recv_backward" in windows
    assert not any("fwd." in str(window) for window in windows)
