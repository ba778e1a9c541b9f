"""The space: everything in it is a valid job, and no valid job of a small enumeration is missing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_lynx.config import Job
from megatron_lynx.config.experts import Experts
from megatron_lynx.search.space import divisors
from tests.config.jobs import catalogued_job
from tests.search.jobs import jobs_of, small_job

SHAPES = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 12),
        "heads": st.sampled_from([2, 4, 6]),
        "kv_groups": st.sampled_from([1, 2]),
        "seq": st.sampled_from([8, 12, 16, 30]),
        "attention": st.sampled_from(["flash", "unfused"]),
    }
)


def job_with(shape: dict[str, Any], batch: int, node_gpus: int = 2) -> Job:
    job = small_job(batch=batch)
    model = job.model.model_copy(update={**shape, "hidden": 24, "ffn": 48, "vocab": 96})
    node = job.cluster.node.model_copy(update={"gpus": node_gpus})
    return job.model_copy(update={"model": model, "cluster": job.cluster.model_copy(update={"node": node})})


def facts(job: Job) -> tuple[Any, ...]:
    layout = job.parallel
    return (layout.tensor, layout.context, layout.pipeline, layout.layers_per_chunk, layout.sequence_parallel, job.batch.micro)


def valid(job: Job, gpus: int) -> set[tuple[Any, ...]]:
    """By asking about every combination; one name for each layout: chunks of a whole stage are no chunks."""
    found = set()
    sizes = range(1, gpus + 1)
    chunks = (None, *range(1, job.model.layers + 1))
    for layout in product(sizes, sizes, sizes, chunks, (False, True), range(1, job.batch.global_ + 1)):
        tensor, context, pipeline, chunk, sequence_parallel, micro = layout
        fused = job.model.attention == "flash" or context == 1
        whole = chunk is not None and chunk * pipeline == job.model.layers
        straddles = gpus > job.cluster.node.gpus and job.cluster.node.gpus % tensor
        if gpus % (tensor * context * pipeline) or straddles or not fused or whole:
            continue
        parallel = {
            "tensor": tensor,
            "context": context,
            "pipeline": pipeline,
            "layers_per_chunk": chunk,
            "sequence_parallel": sequence_parallel,
        }
        data = {**job.model_dump(by_alias=True), "gpus": gpus, "parallel": parallel}
        try:
            Job.model_validate({**data, "batch": {"micro": micro, "global": job.batch.global_}})
        except ValidationError:
            continue
        found.add(layout)
    return found


@settings(max_examples=20, deadline=None)
@given(SHAPES, st.integers(1, 6), st.integers(1, 6))
def test_it_is_what_a_job_accepts(shape: dict[str, Any], gpus: int, batch: int) -> None:
    job = job_with(shape, batch)
    assert {facts(each) for each in jobs_of(job, gpus)} == valid(job, gpus)


@settings(max_examples=25, deadline=None)
@given(SHAPES, st.integers(1, 64), st.integers(1, 48))
def test_each_is_valid_and_there_once(shape: dict[str, Any], gpus: int, batch: int) -> None:
    jobs = list(jobs_of(job_with(shape, batch), gpus))
    assert len({facts(job) for job in jobs}) == len(jobs)
    for job in jobs:
        assert Job.model_validate(job.model_dump(by_alias=True)) == job
        assert job.gpus == gpus
        assert job.parallel.tensor <= 2


def test_tensor_parallel_groups_do_not_straddle_nodes() -> None:
    """Three of six ranks on nodes of four: the second group would be on both. On one node they may be as many as they are."""
    shape = {"layers": 6, "heads": 6, "kv_groups": 6, "seq": 12}

    def sizes(gpus: int) -> set[int]:
        return {each.parallel.tensor for each in jobs_of(job_with(shape, 6, node_gpus=4), gpus)}

    assert sizes(6) == {1, 2}
    assert sizes(3) == {1, 3}


def test_the_optimizer_is_distributed_unless_the_job_says_otherwise() -> None:
    layouts = {"said": {"distributed_optimizer": False}, "unsaid": {"tensor": 1}}
    jobs = {name: catalogued_job("llama-7b", "a800-80g", gpus=1, batch=8, parallel=said) for name, said in layouts.items()}
    found = {name: {each.parallel.distributed_optimizer for each in jobs_of(job, 8)} for name, job in jobs.items()}
    assert found == {"said": {False}, "unsaid": {True}}


def with_model(job: Job, **fields: Any) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update=fields)})


@pytest.mark.parametrize("asked", ["fp8", "experts"])
def test_every_layout_is_one_that_a_job_accepts(asked: str) -> None:
    """A search ranked layouts in FP8 first whose matrices cuBLAS does not take: with t = 2 this width is no multiple of 16."""
    job = small_job("llama-65b", "h800-80g", seq=4096, fp8="delayed" if asked == "fp8" else None)
    experts = Experts(count=8, per_token=2, ffn=1024)
    job = with_model(job, ffn=22000) if asked == "fp8" else with_model(job, experts=experts)
    jobs = list(jobs_of(job, 8))
    assert jobs
    assert {each.parallel.tensor for each in jobs} == ({1} if asked == "fp8" else {1, 2, 4, 8})
    for each in jobs:
        assert Job.model_validate(each.model_dump(by_alias=True)) == each


def test_rows_that_fp8_does_not_take_are_no_micro_batch() -> None:
    """Twelve rows are no multiple of 8."""
    job = with_model(small_job("llama-65b", "h800-80g", batch=4, fp8="delayed"), seq=12)
    assert {each.batch.micro for each in jobs_of(job, 1)} == {2, 4}


def test_it_is_lazy() -> None:
    """A million devices, thousands of sequences: the first layout is there at once."""
    first = next(jobs_of(small_job(batch=2**14), 2**20))
    assert first.gpus == 2**20


def test_divisors_ascend() -> None:
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert divisors(1) == (1,)
