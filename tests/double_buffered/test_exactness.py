"""Losses, gradients and weights of every update equal those of the version rule, to the bit.

The reference is stock's flushing schedule in the same layout: W(j-1) is loaded by hand for batch j, and its update made to W(j).
"""

from __future__ import annotations

import pytest

from tests.tiny_jobs import tiny_job

from ..long import long
from ..testbed.on_ranks import same
from . import on_ranks

MEGATRON = {"ddp": True, "optimizer": "megatron"}
OVERLAPPED = {"overlap_grad_reduce": True}
FUSED = {"model": {"gradient_accumulation_fusion": True}}
PER_TOKEN = {"model": {"calculate_per_token_loss": True}}
FULL = {"model": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}}
LAYOUTS = [
    ({"microbatches": 2}, {}),
    ({"pipeline": 2, "microbatches": 3}, MEGATRON | FULL),
    *long(
        ({"pipeline": 2, "microbatches": 2}, {}),
        ({"pipeline": 2, "microbatches": 2, "dtype": "bf16"}, MEGATRON),
        ({"pipeline": 2, "microbatches": 3, "distributed_optimizer": True}, MEGATRON),
    ),
    ({"pipeline": 4, "microbatches": 4}, MEGATRON | OVERLAPPED),
    ({"pipeline": 2, "tensor": 2, "sequence_parallel": True, "microbatches": 3}, MEGATRON),
    ({"pipeline": 2, "replicas": 2, "microbatches": 3, "distributed_optimizer": True, "dtype": "bf16"}, MEGATRON),
]
DEFERRED = [
    ({"pipeline": 2, "microbatches": 2}, FULL),
    *long(({"pipeline": 2, "microbatches": 3, "dtype": "bf16"}, FUSED)),
    ({"pipeline": 2, "tensor": 2, "sequence_parallel": True, "microbatches": 2}, FUSED),
    ({"pipeline": 2, "replicas": 2, "microbatches": 3, "distributed_optimizer": True, "dtype": "bf16"}, {}),
    *long(
        ({"pipeline": 4, "microbatches": 4}, OVERLAPPED),
        ({"pipeline": 2, "replicas": 2, "microbatches": 2, "distributed_optimizer": True}, OVERLAPPED | FUSED),
    ),
    ({"pipeline": 2, "replicas": 2, "microbatches": 2}, OVERLAPPED | PER_TOKEN),
]
BATCHES = 4


@pytest.mark.parametrize(("layout", "how"), LAYOUTS, ids=str)
def test_the_version_rule_to_the_bit(pool_of, layout, how):
    compare(pool_of, tiny_job("gpt", **layout), how)


@pytest.mark.parametrize(("layout", "how"), DEFERRED, ids=str)
def test_deferred_updates_to_the_bit(pool_of, layout, how):
    """Some backwards of the next batch come before the update: they add to another gradient, and see the version of the rule."""
    compare(pool_of, tiny_job("gpt", **layout), {**MEGATRON, "defer_updates": True, **how})


def test_clipping_with_momentum(pool_of):
    """The norm is that of the whole batch on all stages, and larger than what is allowed."""
    how = {"ddp": True, "optimizer": None, "optimizer_config": {"optimizer": "sgd", "sgd_momentum": 0.9, "clip_grad": 0.05}}
    for run in compare(pool_of, tiny_job("gpt", pipeline=2, microbatches=3), how):
        assert all(norm > 0.05 for _, norm, _ in run.steps)


@pytest.mark.parametrize(("distributed_optimizer", "defer_updates"), [(False, False), (True, True), *long((True, False))])
def test_a_batch_that_overflows_is_skipped(pool_of, distributed_optimizer, defer_updates):
    """Then W(j+1) is W(j), and the gradient that batch j + 1 took at W(j-1) is applied to it."""
    job = tiny_job("gpt", pipeline=2, microbatches=2, dtype="bf16", distributed_optimizer=distributed_optimizer)
    how = {"ddp": True, "optimizer": None, "optimizer_config": {"optimizer": "adam", "loss_scale": 1024.0}, "spoilt": [1]}
    how["defer_updates"] = defer_updates
    for run in compare(pool_of, job, how):
        assert [success for success, *_ in run.steps] == [True, False, True, True]
        assert same(run.parameters[0], run.parameters[1])


def compare(pool_of, job, how, batches=BATCHES):
    """What was trained without flushes, by rank."""
    runs = []
    for rank, (expected, run) in enumerate(pool_of(job.gpus).run(on_ranks.trained_twice, job, how, batches)):
        finite = [made for made, *_ in run.steps] if "optimizer_config" in how else [True] * batches
        for batch in range(batches):
            place = f"rank {rank}, batch {batch}"
            if finite[batch] and not (job.replicas > 1 and job.parallel.distributed_optimizer):
                assert same(expected.gradients[batch], run.gradients[batch]), place
            assert same(expected.parameters[batch], run.parameters[batch]), place
        assert same(expected.losses, run.losses), f"rank {rank}"
        assert str(expected.steps) == str(run.steps)
        assert not same(run.parameters[-1], run.parameters[-2])
        runs.append(run)
    return runs
