"""Candidates with a plan: they take as long as that plan, weight gradients aside."""

from __future__ import annotations

import pytest

from megatron_lynx.config import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.planner.writing import written
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.entry import AllStages, Ends, Floored
from megatron_lynx.search.floor import LayerCost
from tests.config.jobs import catalogued_job


def test_a_candidate_takes_as_long_as_the_plan_of_its_stages() -> None:
    """Of few micro-batches, from which the others follow."""
    job, cost = mixtral(), LayerCost.of(mixtral())
    ends = Floored(job, cost, cost.floor(job), offload=False, besides_none=False).closer()
    assert isinstance(ends, Ends)
    stages = ends.closer()
    assert isinstance(stages, AllStages)
    found = stages.closer()
    assert isinstance(found, Candidate)
    plan = written(job, stages.answers, job=job.digest, profile=cost.profile.digest)
    assert found.step_s - update_s(job, cost.profile) == pytest.approx(rehearse(plan, cost.profile).step_s, rel=1e-9)


def mixtral() -> Job:
    layout = {"pipeline": 4, "expert": 8, "distributed_optimizer": True}
    job = catalogued_job("mixtral-8x7b", "h800-80g", gpus=32, micro=2, batch=256, parallel=layout, policy="planned")
    model = job.model.model_copy(update={"layers": 16, "implementation": "transformer_engine"})
    return job.model_copy(update={"model": model, "budget": job.budget.model_copy(update={"memory_gib": 26})})
