"""Training without flushes: every bit is that of the version rule, and nothing is used before it was waited for."""

from __future__ import annotations

from typing import Any

import pytest

from tests.double_buffered.test_plans import without_flushes
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable

from . import on_ranks
from .test_layouts import assert_clean

pytestmark = pytest.mark.streams

MEGATRON = {"ddp": True, "optimizer": "megatron"}


@pytest.mark.parametrize(
    ("stages", "defer_updates"), [(2, False), (4, True), *long((2, True), (3, False), (3, True), (4, False))]
)
def test_the_version_rule(pool_of: Any, stages: int, defer_updates: bool) -> None:
    job = tiny_job("gpt", layers=6 if stages == 3 else 4, pipeline=stages, microbatches=stages)
    how = {**MEGATRON, "defer_updates": defer_updates}
    for rank, under in enumerate(pool_of(stages).run(on_ranks.without_flushes, job, how, None)):
        assert_clean(under, f"rank {rank}")


@pytest.mark.parametrize("defer_updates", [*long(False), True])
def test_under_a_plan_that_recomputes_and_offloads(pool_of: Any, defer_updates: bool) -> None:
    job = tiny_job("gpt", pipeline=2, microbatches=3)
    plan = without_flushes(offloading(plan_for(job, lambda layer: recomputable(job) if layer % 2 else ()), 12_000))
    how = {**MEGATRON, "defer_updates": defer_updates}
    under = pool_of(2).run(on_ranks.without_flushes, job, how, plan)
    assert under[0].moved > 0
    for rank, one in enumerate(under):
        assert_clean(one, f"rank {rank}")
