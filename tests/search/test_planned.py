"""Candidates with a plan: they take as long as that plan, weight gradients aside."""

from __future__ import annotations

import pytest

from megatron_lynx.config import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.planner.writing import written
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.best_first import Candidate, LayerCost, looks_at_plan
from megatron_lynx.solver.stages import Stages
from tests.config.jobs import catalogued_job

LOOKS = 4
"""One at each stage."""


def test_a_candidate_takes_as_long_as_the_plan_of_its_stages() -> None:
    """Of few micro-batches, from which the others follow."""
    job, cost = mixtral(), LayerCost.of(mixtral())
    stages_s = cost.stages_s(job)
    *bounds_s, candidate = looks_at_plan(job, cost.profile, cost.floor_s(job, stages_s), max(stages_s))
    assert len(bounds_s) == LOOKS
    assert bounds_s == sorted(bounds_s)
    assert isinstance(candidate, Candidate)
    stages = Stages(candidate.job, cost.profile)
    plan = written(job, [*map(stages.answer, range(4))])
    assert candidate.step_s - update_s(job, cost.profile) == pytest.approx(rehearse(plan, cost.profile).step_s, rel=1e-9)


def mixtral() -> Job:
    layout = {"pipeline": 4, "expert": 8, "distributed_optimizer": True}
    job = catalogued_job("mixtral-8x7b", "h800-80g", gpus=32, micro=2, batch=256, parallel=layout, policy="planned")
    model = job.model.model_copy(update={"layers": 16, "implementation": "transformer_engine"})
    return job.model_copy(update={"model": model, "budget": job.budget.model_copy(update={"memory_gib": 26})})
