"""In a loop written for Megatron's schedules: clear gradients, forward and backward, step; evaluate when drained."""

from __future__ import annotations

import pytest

from tests.tiny_jobs import tiny_job

from ..testbed.on_ranks import same
from . import on_ranks


@pytest.mark.parametrize("defer_updates", [False, True])
def test_a_loop_under_the_hooks(pool_of, defer_updates):
    job = tiny_job("gpt", pipeline=2, microbatches=3)
    how = {"ddp": True, "optimizer": "megatron", "defer_updates": defer_updates}
    for expected, run, (sizes, evaluation) in pool_of(2).run(on_ranks.hooked, job, how):
        assert same(expected.losses, run.losses)
        assert same(expected.parameters, run.parameters)
        assert same(expected.evaluation, run.evaluation)
        assert str(expected.steps) == str(run.steps)
        assert "num_microbatches: found 4, needed 3" in sizes
        assert "evaluation while micro-batches are in flight" in evaluation
