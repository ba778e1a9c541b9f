"""The interpreter, given 1F1B's order, is Megatron's 1F1B: equal in every bit of losses, gradients and weights."""

from __future__ import annotations

import pytest

from tests.tiny_jobs import tiny_job

from . import on_ranks

MEGATRON = {"ddp": True, "optimizer": "megatron"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAYOUTS = [
    ({"pipeline": 2, "microbatches": 3}, {}, {}),
    ({"pipeline": 2, "microbatches": 1}, {}, FULL),
    ({"pipeline": 2, "microbatches": 4, "dtype": "bf16"}, MEGATRON, {}),
    ({"pipeline": 4, "microbatches": 6}, MEGATRON | {"overlap_grad_reduce": True}, {}),
    ({"pipeline": 4, "microbatches": 3}, {}, {}),
    ({"pipeline": 2, "tensor": 2, "sequence_parallel": True, "microbatches": 3}, MEGATRON, {}),
    ({"pipeline": 2, "replicas": 2, "microbatches": 3}, MEGATRON | {"overlap_grad_reduce": True, "align": True}, {}),
]


@pytest.mark.parametrize(("layout", "how", "setting"), LAYOUTS, ids=str)
def test_1f1b_equals_stock(pool_of, layout, how, setting):
    job = tiny_job("gpt", **layout)
    for rank, (stock, interpreted) in enumerate(pool_of(job.gpus).run(on_ranks.stock_and_interpreted, job, how, setting)):
        assert stock.equals(interpreted), f"rank {rank}"
        assert all(stock.gradients)
        assert len(stock.losses) in (0, 2 * job.microbatches)


def test_a_message_is_sent_when_the_one_before_has_arrived(pool_of):
    """Deferred updates post messages and go on. What is sent lives until somebody has waited for it, and not longer."""
    job = tiny_job("gpt", pipeline=2, microbatches=3)
    for sent, early in pool_of(2).run(on_ranks.sent_too_early, job, {**MEGATRON, "defer_updates": True}):
        assert sent > 2 * job.microbatches
        assert early == []
