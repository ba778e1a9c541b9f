"""Candidates with a plan: they take as long as the planner's choice among its own plans, weight gradients aside."""

from __future__ import annotations

import pytest

from megatron_lynx.cost.update import update_s
from megatron_lynx.plan.experts import replays_beside_forwards
from megatron_lynx.planner.writing import written
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.entry import AllStages, Ends, Floored
from megatron_lynx.search.floor import LayerCost
from megatron_lynx.solver.stages import Stages
from tests.solver.test_early_exchanges import mixtral


@pytest.mark.parametrize(("memory_gib", "late"), [(20, False), (26, True)])
def test_replays_while_tokens_travel_are_taken_only_where_the_step_is_shorter(memory_gib: float, late: bool) -> None:
    """A search took them wherever the solver did, so that a layout could rank by a step that no plan would have chosen."""
    job, cost = mixtral(memory_gib), LayerCost.of(mixtral(memory_gib))
    ends = Floored(job, cost, cost.floor(job), offload=False, besides_none=False).closer()
    assert isinstance(ends, Ends)
    stages = ends.closer()
    assert isinstance(stages, AllStages)
    found = stages.closer()
    assert isinstance(found, Candidate)
    steps_s = [step_s(job, early=early) for early in (True, False)]
    assert (steps_s[1] < steps_s[0]) == late
    assert found.step_s - update_s(job, cost.profile) == pytest.approx(min(steps_s), rel=1e-9)


def step_s(job, *, early: bool) -> float:
    """Of the plan that may replay in exchanges of forwards, or may not."""
    profile = analytic_profile(job)
    stages = Stages(job, profile, early_exchanges=early)
    plan = written(job, [stages.answer(stage) for stage in range(4)], job=job.digest, profile=profile.digest)
    assert replays_beside_forwards(plan) == early
    return rehearse(plan, profile).step_s
