"""A plan is put in force and taken back: every object is then the one it was, to the identity (rule R7)."""

from __future__ import annotations

import pytest

from tests.tiny_jobs import tiny_job

from ..transparency.plans import plan_for, recomputable
from . import on_ranks


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2, "sequence_parallel": True}, {"pipeline": 2, "layers_per_chunk": 1}], ids=str
)
def test_removal_restores_the_identical_objects(pool_of, layout):
    job = tiny_job("gpt", **layout)
    plan = plan_for(job, lambda _: recomputable(job, gather=True))
    for seen in pool_of(job.gpus).run(on_ranks.install_and_remove, job, plan):
        assert len(seen["installed"]) == len(seen["claimed"])
        assert {f"megatron.core.pipeline_parallel.schedules.{name}_step" for name in ("forward", "backward")} <= {
            *seen["installed"]
        }
        assert [seen["lifted"], seen["recorded while lifted"]] == [[], []]
        assert seen["in force again"] == seen["installed"]
        assert seen["recorded again"]
        assert [seen["removed"], seen["context left"], seen["context failed"]] == [[], [], []]


@pytest.mark.quick
def test_importing_changes_nothing(pool_of):
    assert pool_of(1).run(on_ranks.changed_by_import) == [[]]
