"""Buckets of gradients and what fills them up, against those that the real DistributedDataParallel makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.config import Experts, Job
from megatron_lynx.config.parallel import Overlap
from megatron_lynx.cost.parameters import ALIGNED, ALIGNED_FOR_BANDWIDTH, buckets, filled_numbers, stage_parameters
from megatron_lynx.testbed.ranks import RankPool
from tests.cost.buckets_on_ranks import buffers
from tests.stock.parts import stage_parts
from tests.tiny_jobs import tiny_job

SIZE = {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 2048, "seq": 64, "tied_embeddings": False}
"""All parameters are multiples of 64 numbers, as those of models that people train are."""


def job_of(like: Any = "gpt", distributed: bool = True, fields: dict[str, Any] | None = None, **overlap: Any) -> Job:
    job = tiny_job(like, **SIZE, replicas=2, distributed_optimizer=distributed, **(fields or {}))
    return Job.model_validate({**job.model_dump(by_alias=True), "policy": "none", "overlap": Overlap(**overlap).model_dump()})


WHOLE = [
    job_of(),
    job_of(padded_buckets=True),
    job_of("llama", padded_buckets=True, buckets=8),
    job_of(distributed=False, padded_buckets=True),
    job_of("llama", fields={"experts": Experts(count=4, per_token=2, ffn=96)}, padded_buckets=True),
]
CUT = [
    job_of(gradients=True, buckets=4),
    job_of(gradients=True, buckets=4, padded_buckets=True),
    job_of(gradients=True, bucket_parameters=60_000, padded_buckets=True),
]


def test_a_buffer_of_one_bucket_is_as_large_as_predicted(pool_of: Callable[[int], RankPool]) -> None:
    for job, found in zip(WHOLE, pool_of(2).run(buffers, WHOLE)[0], strict=True):
        parameters = stage_parameters(job, 0)
        assert parameters.total == sum(own for own, _, _ in found)
        assert filled_numbers(job, 0, parameters) == sum(numbers - own for own, numbers, _ in found)
        assert buckets(job, 0, parameters) == sum(number for _, _, number in found) == len(found)


def test_buffers_that_are_cut_hold_no_more_than_predicted(pool_of: Callable[[int], RankPool]) -> None:
    """Parameters are not divided, so buckets are fewer than were asked for, never more."""
    for job, found in zip(CUT, pool_of(2).run(buffers, CUT)[0], strict=True):
        parameters, ((own, numbers, number),) = stage_parameters(job, 0), found
        assert 1 < number <= buckets(job, 0, parameters)
        assert 0 <= numbers - own <= filled_numbers(job, 0, parameters)


def test_experts_that_are_shared_out_have_buffers_of_their_own(pool_of: Callable[[int], RankPool]) -> None:
    jobs = [job_of("llama", fields={"expert": 2, "experts": Experts(count=4, per_token=2, ffn=96)}, padded_buckets=True)]
    (found,) = pool_of(2).run(buffers, jobs)[0]
    parameters = stage_parameters(jobs[0], 0)
    assert [own for own, _, _ in found] == [parameters.without_experts, parameters.experts]
    assert filled_numbers(jobs[0], 0, parameters) == sum(numbers - own for own, numbers, _ in found)
    assert buckets(jobs[0], 0, parameters) == len(found) == 2


@pytest.mark.parametrize("padded", [False, True])
def test_what_fills_buckets_up_is_held_with_weights_and_gradients(padded: bool) -> None:
    job = job_of(padded_buckets=padded)
    parameters = stage_parameters(job, 0)
    memory, numbers = stage_parts(job, 0).fullest, parameters.total + filled_numbers(job, 0, parameters)
    assert (memory.parameters, memory.gradients) == (4 * numbers, 4 * numbers)
    assert numbers % (ALIGNED_FOR_BANDWIDTH if padded else ALIGNED) == 0
