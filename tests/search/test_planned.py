"""Drafts: their bounds come close to the step of their plan, weight gradients aside."""

from __future__ import annotations

from megatron_lynx.config import Job
from megatron_lynx.planner.writing import written
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.best_first import Draft, LayerCost, looks_at_plan
from tests.config.jobs import catalogued_job

LOOKS = 4
"""One at each stage."""


def test_a_draft_takes_a_bit_less_than_the_plan_of_its_stages() -> None:
    job, cost = mixtral(), LayerCost.of(mixtral())
    stages_s = cost.stages_s(job)
    *bounds_s, draft = looks_at_plan(job, cost.profile, cost.floor_s(job, stages_s), max(stages_s))
    assert len(bounds_s) == LOOKS
    assert bounds_s == sorted(bounds_s)
    assert isinstance(draft, Draft)
    assert draft.step_s == bounds_s[-1]
    plan = written(job, [*map(draft.stages.answer, range(4))])
    simulated_s = rehearse(plan, cost.profile).step_s
    assert 0.95 * simulated_s < draft.step_s <= simulated_s


def mixtral() -> Job:
    layout = {"pipeline": 4, "expert": 8, "distributed_optimizer": True}
    job = catalogued_job("mixtral-8x7b", "h800-80g", gpus=32, micro=2, batch=256, parallel=layout, policy="planned")
    model = job.model.model_copy(update={"layers": 16, "implementation": "transformer_engine"})
    return job.model_copy(update={"model": model, "budget": job.budget.model_copy(update={"memory_gib": 26})})
