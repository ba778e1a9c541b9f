"""Exchanges of tokens as windows: offered to the experts' own half and to the attention below, simulated, and written down."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from megatron_lynx.anatomy import EXPERTS
from megatron_lynx.anatomy.address import ON_DEMAND, stretches_in
from megatron_lynx.config import Job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.rule import Rule
from megatron_lynx.planner import decide, loads
from megatron_lynx.planner.evaluation import most_held
from megatron_lynx.planner.loads import with_load
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.simulator.halves import segments
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.options import HalfOptions, StageProblems
from megatron_lynx.solver.problem import Choices
from megatron_lynx.units import GIB
from tests.config.jobs import catalogued_job
from tests.heavier import rehearsed_with_load_of
from tests.uniform import uniform_plan


def qwen3(**layout: object) -> Job:
    """On two stages of a node each."""
    parallel = {"pipeline": 2, "expert": 8, "distributed_optimizer": True, **layout}
    job = catalogued_job("qwen3-30b-a3b", "h800-80g", gpus=16, micro=2, batch=256, parallel=parallel, policy="planned")
    return job.model_copy(update={"model": job.model.model_copy(update={"implementation": "transformer_engine"})})


def begun(choices: Choices) -> set[str]:
    """The windows of backwards in which recomputations begin."""
    return {stretches_in(option.window)[0].window if option.window else ON_DEMAND for option in choices}


def problems(job: Job) -> tuple[Choices, Choices]:
    attention, experts, *_ = StageProblems(job, HalfOptions(job, analytic_profile(job))).of(1).halves
    return attention, experts


def test_the_first_exchange_hides_the_experts_recomputations_and_the_last_those_of_the_attention_below() -> None:
    attention, experts = problems(qwen3())
    assert begun(attention) == {ON_DEMAND, "bwd.mlp.2"}
    assert begun(experts) == {ON_DEMAND, "bwd.mlp.0"}


def test_experts_that_every_rank_has_all_of_exchange_nothing() -> None:
    job = qwen3(expert=1)
    assert window_lengths_s(analytic_profile(job), "bwd", EXPERTS, 1) == ()
    attention, experts = problems(job)
    assert begun(attention) == begun(experts) == {ON_DEMAND}


def test_experts_that_are_kept_whole_have_one_choice_and_no_windows() -> None:
    job = qwen3()
    whole = job.model.experts.model_copy(update={"whole": True})
    job = job.model_copy(update={"model": job.model.model_copy(update={"experts": whole})})
    attention, experts = problems(job)
    assert begun(attention) == {ON_DEMAND}
    assert [(option.recompute, option.memory.movable) for option in experts] == [((), 0)]
    plan = uniform_plan(job)
    assert plan.parallel.expert == 1
    assert not any(rule.recomputed_in("mlp") for stage in plan.stages for rule in stage.rules)


@pytest.mark.parametrize("passing", ["fwd", "bwd"])
def test_a_half_of_experts_takes_as_long_with_windows_as_without(passing: str) -> None:
    profile = analytic_profile(qwen3())
    half = profile.experts
    assert half is not None
    found = segments(profile, passing, EXPERTS)  # type: ignore[arg-type]
    whole_s = half.forward_s if passing == "fwd" else half.backward_s
    assert sum(found.compute_s) + sum(found.windows_s) == pytest.approx(whole_s)
    assert sorted(found.windows_s) == [0.0, half.exchange_s, half.exchange_s]


def test_all_that_can_be_recomputed_is_hidden_where_memory_is_short() -> None:
    """The plan holds half of what stock keeps of activations, and takes no longer: each exchange outlasts what it hides. The host
    is left out: with sixteen experts a rank it is the slower one. (With more memory, waits also hide more weight gradients.)"""
    job = qwen3()
    profile = analytic_profile(job).model_copy(update={"host_time": None})
    decision = decide(job.model_copy(update={"budget": job.budget.model_copy(update={"memory_gib": 54})}), profile)
    plan = Plan.model_validate(decision.plan.model_dump())
    assert plan.parallel.expert == 8
    windows = {(rule.windows.mlp, rule.windows.attention) for stage in plan.stages for rule in stage.rules}
    assert ("bwd.mlp.0", "bwd.mlp.2") in windows <= {*product(("bwd.mlp.0", None), ("bwd.mlp.2", None))}
    assert all(stage.predicted.exposed_recompute_s == 0 < stage.predicted.hidden_recompute_s for stage in plan.stages)
    assert all(memory.total <= 54 * GIB for memory in decision.memory)
    free = decide(job, profile)
    assert decision.simulation.step_s <= 1.004 * free.simulation.step_s


def within(gib: float) -> Job:
    job = qwen3()
    return job.model_copy(update={"budget": job.budget.model_copy(update={"memory_gib": gib})})


@pytest.mark.parametrize("more", [0, 0.05])
def test_a_load_that_does_not_fit_in_its_rehearsal_is_not_promised(monkeypatch: pytest.MonkeyPatch, more: float) -> None:
    """Also where a straight line between two loads says more than what fits."""
    between = loads._between
    monkeypatch.setattr(loads, "_between", lambda *given: between(*given) + more)
    decision = decide(within(58), analytic_profile(within(58)))
    for stage in decision.plan.stages:
        load = stage.predicted.moe_load
        assert 1 <= load < 2
        loaded = with_load(decision.job, load)
        rehearsed = rehearsed_with_load_of(loaded, decision.plan, analytic_profile(loaded))
        assert max(each.device_bytes for each in most_held(loaded, rehearsed, stage.stage)) <= 58 * GIB


def test_a_plan_says_which_load_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the balanced load does not, in 54 GiB; with all of the device it does. It is found in a few rehearsals."""
    job, tight, rehearse, loads_tried = qwen3(), within(54), loads.rehearse, []

    def counted(*args: Any, loaded: Any, **kwargs: Any) -> Simulation:
        loads_tried.append(loaded)
        return rehearse(*args, loaded=loaded, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(loads, "rehearse", counted)
        fitting = [stage.predicted.moe_load for stage in decide(tight, analytic_profile(job)).plan.stages]
    assert all(1 <= load < 2 for load in fitting)
    assert len(loads_tried) < 6
    experts = job.model.experts.model_copy(update={"holds": 2.0})
    held = tight.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})
    found = decide(held, analytic_profile(held))
    assert found.plan.model.moe_load == 2.0
    assert max(memory.total for memory in found.memory) <= 54 * GIB
    assert not any(stage.predicted.moe_load for stage in found.plan.stages if stage.predicted.moe_load < 2)
    few = catalogued_job("qwen3-30b-a3b", "h800-80g", gpus=64, batch=64, parallel={"expert": 8}, policy="planned")
    roomy = few.model_copy(update={"budget": few.budget.model_copy(update={"memory_gib": 900})})
    assert [stage.predicted.moe_load for stage in decide(roomy, analytic_profile(roomy)).plan.stages] == [0.0]


def test_what_ranks_let_go_of_alone_makes_room_for_more_rows() -> None:
    """HybridEP in 70 GiB: the last stage keeps all of its experts' halves. Rehearsed with what they fall back to."""
    job, experts = qwen3(), qwen3().model.experts.model_copy(update={"dispatcher": "hybridep"})
    model, budget = job.model.model_copy(update={"experts": experts}), job.budget.model_copy(update={"memory_gib": 70})
    job = job.model_copy(update={"model": model, "budget": budget})
    profile = analytic_profile(job)
    decision = decide(job, profile)
    stage = decision.plan.stages[1]
    assert not any(rule.recompute for rule in stage.rules)
    again = ("experts_fc1", "experts_activation")
    assert stage.experts_hold == stage.predicted.moe_load
    fallen = stage.model_copy(update={"rules": tuple(rule_with(rule, again) for rule in stage.rules)})
    plan = decision.plan.model_copy(update={"stages": (decision.plan.stages[0], fallen)})
    kept, more = stage.predicted.moe_load, stage.predicted.moe_load_fallen_back
    assert more > 2 * kept, "rows are less than half of it"

    def held(plan: Plan, load: float) -> int:
        loaded = with_load(decision.job, load)
        return max(each.device_bytes for each in most_held(loaded, rehearsed_with_load_of(loaded, plan, profile), 1))

    assert held(plan, more) <= 70 * GIB < held(decision.plan, 1.1 * kept)


def rule_with(rule: Rule, again: tuple[str, ...]) -> Rule:
    """The rule which recomputes these items, on demand."""
    kept = tuple(item for item in rule.keep if item not in again)
    return Rule.model_validate(rule.model_copy(update={"keep": kept, "recompute": again}).model_dump())
