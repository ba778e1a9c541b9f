"""The order in which real megatron-core runs a step is the order that we say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.testbed.ranks import RankPool
from tests.schedule.on_ranks import recorded_order
from tests.schedule.orders import write_actions
from tests.tiny_jobs import tiny_job

Pools = Callable[[int], RankPool]


@pytest.mark.parametrize(("pipeline", "microbatches"), [(2, 4), (2, 1), (4, 6), (4, 2)])
def test_1f1b(pool_of: Pools, pipeline: int, microbatches: int) -> None:
    job = tiny_job(pipeline=pipeline, microbatches=microbatches)
    recorded = dict(pool_of(pipeline).run(recorded_order, job))
    expected = with_flushes(pipeline, microbatches).orders
    assert recorded == {stage: write_actions(order) for stage, order in enumerate(expected)}


@pytest.mark.parametrize(("microbatches", "group_size"), [(4, None), (6, 4), (2, None), (4, 4)])
def test_interleaved(pool_of: Pools, microbatches: int, group_size: int | None) -> None:
    job = tiny_job("gpt", pipeline=2, layers_per_chunk=1, microbatches=microbatches, microbatch_group=group_size)
    recorded = dict(pool_of(2).run(recorded_order, job))
    expected = with_flushes(2, microbatches, 2, group_size).orders
    assert recorded == {stage: write_actions(order) for stage, order in enumerate(expected)}
