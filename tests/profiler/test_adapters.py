"""Real layers with adapters save what their shape says, byte by byte."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from megatron_lynx.anatomy import DENSE, HALVES
from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import stage_parameters
from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.profiler.shape import LayerShape
from tests.profiler.on_ranks import measure_one
from tests.profiler.test_measured import TE, sizes
from tests.te_releases import pool_with
from tests.tiny_jobs import tiny_job
from tests.transparency.adapters import adapters, parameters_of

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
JOBS = {
    "all": {"targets": ALL},
    "none that saves its input": {"targets": ("linear_fc2",)},
    "dropout": {"targets": ALL, "dropout": 0.1},
    "attention": {"targets": ("linear_qkv", "linear_proj")},
}


def measure(rank: int, job: Job) -> Any:
    from megatron_lynx.profiler import timing

    untimed = {"item_seconds": lambda *_: ({}, {}), "gradient_gemm_seconds": lambda *_: {}, "item_flops": lambda *_: {}}
    with adapters(job), patch.multiple(timing, **untimed):
        return measure_one(rank, job)


def counts(rank: int, job: Job) -> Any:
    return parameters_of(job)


@pytest.mark.parametrize("name", JOBS)
def test_saved_tensors(pool_of: Any, name: str) -> None:
    job = tiny_job("llama", adapters={"rank": 4, **JOBS[name]})
    measured = pool_of(1).run(measure, job)[0]
    for half in HALVES:
        found, expected = (by_reader(tensors) for tensors in (measured[half].tensors, half_tensors(LayerShape.of(job), half)))
        assert found == expected


def by_reader(tensors: Any) -> Counter[Any]:
    found = Counter[Any]()
    for tensor in tensors:
        if tensor.saved_by:
            found[tensor.made_by, tensor.saved_by] += tensor.bytes
    return found


def test_saved_tensors_of_transformer_engine() -> None:
    """The norm inside a linear counts as the linear's. A mask of dropout has another type on a CPU."""
    with pool_with("2.9", 1) as pool:
        for fields in (fields for fields in JOBS.values() if "dropout" not in fields):
            job = tiny_job("gpt", **TE, adapters={"rank": 4, **fields})
            [measured] = pool.run(measure, job)
            shape = replace(LayerShape.of(job), device="cuda")
            for half in HALVES:
                found, expected = (with_norms(tensors) for tensors in (measured[half].tensors, half_tensors(shape, half)))
                assert found == expected, fields


def with_norms(tensors: Any) -> Counter[Any]:
    linear_of, found = {DENSE[half].norm: DENSE[half].column_parallel for half in HALVES}, Counter[Any]()
    for (maker, readers), size in sizes(tensors).items():
        if readers:
            found[linear_of.get(maker, maker), tuple(linear_of.get(reader, reader) for reader in readers)] += size
    return found


@pytest.mark.parametrize("layout", [{}, {"tensor": 2, "sequence_parallel": True}])
def test_parameters(pool_of: Any, layout: dict[str, Any]) -> None:
    job = tiny_job("llama", adapters={"rank": 4, "targets": ALL}, **layout)
    expected = stage_parameters(job, 0)
    for trained, frozen in pool_of(job.gpus).run(counts, job):
        assert (trained, frozen) == (expected.total, expected.frozen)
