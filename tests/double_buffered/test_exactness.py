"""Weights after every update equal the version rule's, to the bit: against stock's flushing schedule with W(j-1) loaded by hand."""

from __future__ import annotations

import pytest

from megatron_lynx.testbed.tiny_jobs import tiny_job

from . import on_ranks

MEGATRON = {"ddp": True, "optimizer": "megatron"}
LAYOUTS = [
    ({"microbatches": 2}, {}),
    ({"pipeline": 2, "microbatches": 2}, {}),
    ({"pipeline": 2, "microbatches": 3}, MEGATRON),
    ({"pipeline": 2, "microbatches": 3, "distributed_optimizer": True}, MEGATRON),
    ({"pipeline": 2, "microbatches": 2, "dtype": "bf16"}, MEGATRON),
    ({"pipeline": 4, "microbatches": 4}, MEGATRON),
    ({"pipeline": 2, "tensor": 2, "sequence_parallel": True, "microbatches": 3}, MEGATRON),
    ({"pipeline": 2, "replicas": 2, "microbatches": 3, "distributed_optimizer": True, "dtype": "bf16"}, MEGATRON),
]


@pytest.mark.parametrize(("layout", "how"), LAYOUTS, ids=str)
def test_the_version_rule_to_the_bit(pool_of, layout, how):
    job = tiny_job("gpt", **layout)
    for rank, (expected, run) in enumerate(pool_of(job.gpus).run(on_ranks.trained_twice, job, how, 4)):
        assert on_ranks.same(expected.losses, run.losses), f"rank {rank}"
        for batch in range(4):
            assert on_ranks.same(expected.parameters[batch], run.parameters[batch]), f"rank {rank}, batch {batch}"
