"""The second version: nobody reads it once retired (R10), nothing else is kept, and it starts anew where the pipeline drained."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_jobs import tiny_job

from ..testbed.on_ranks import same
from . import on_ranks

ADAM = {"ddp": True, "optimizer": "megatron"}


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_nobody_reads_the_retired_buffer(pool_of, distributed_optimizer):
    """Filled with NaN right before it is filled again: no bit differs. One backward earlier: everything is lost."""
    job = tiny_job("gpt", pipeline=2, microbatches=3, distributed_optimizer=distributed_optimizer)
    undisturbed = pool_of(2).run(on_ranks.trained_twice, job, ADAM, 3)
    for (expected, _), seen in zip(undisturbed, pool_of(2).run(on_ranks.spoilt_memory, job, ADAM, False), strict=True):
        assert same(vars(expected)["parameters"], seen["run"].parameters)
        assert same(expected.losses, seen["run"].losses)
    for seen in pool_of(2).run(on_ranks.spoilt_memory, job, ADAM, True):
        assert any(torch.isnan(weights).any() for weights in seen["run"].parameters[1].values())


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_all_who_owned_the_weights_have_moved(pool_of, distributed_optimizer):
    """Behind an update no tensor in the process looks into the retired buffer, nor into the gradient of the next batch.

    Second buffers are as large as the first; the first stage, which waits for nobody, has one gradient.
    """
    job = tiny_job("gpt", pipeline=2, microbatches=3, distributed_optimizer=distributed_optimizer)
    for stage, seen in enumerate(pool_of(2).run(on_ranks.spoilt_memory, job, {**ADAM, "defer_updates": True})):
        assert seen["left behind"] == 0
        padding = 1.05 if distributed_optimizer else 1.0
        assert seen["parameters"] <= seen["second version"] <= padding * seen["parameters"]
        assert seen["gradients"] * stage <= seen["second gradient"] <= padding * seen["gradients"] * stage


@pytest.mark.parametrize(("dtype", "defer_updates"), [("fp32", True), ("bf16", False)])
def test_stopping_evaluating_and_resuming(pool_of, dtype, defer_updates):
    """Going on behind a drain, and resuming from what was saved there, are the same: versions are counted anew."""
    job = tiny_job("gpt", pipeline=2, microbatches=3, dtype=dtype)
    for expected, run, resumed in pool_of(2).run(on_ranks.stopped_and_resumed, job, {**ADAM, "defer_updates": defer_updates}):
        assert same(expected.losses, run.losses)
        assert same(expected.evaluation, run.evaluation)
        assert same(expected.parameters, run.parameters)
        assert same(resumed.parameters, run.parameters[3:])
        assert same(resumed.losses, run.losses[len(run.losses) // 2 :])
