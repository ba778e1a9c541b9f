"""The search: the answer of going through everything, in order, within the budget, and why not when there is none."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from itertools import product

import pytest

from megatron_lynx.config import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible
from megatron_lynx.estimate import estimate
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.search import POLICIES, Ranking, search
from megatron_lynx.search.best_first import STOCK, BestFirst, Candidate
from megatron_lynx.search.space import Space
from tests.config.jobs import catalogued_job
from tests.long import long
from tests.search.jobs import jobs_of, small_job, with_budget

TIGHT_GIB = 24.0
"""Where a third of the layouts of `small_job` does not fit, and many others only with recomputations or copies."""


def everything(job: Job, gpus: int, policies: tuple[str, ...]) -> list[Candidate]:
    """The best of each layout, of plans without weight gradients in waits: nothing pruned, nothing put off."""
    running = BestFirst(Space(job, gpus), policies)
    best: dict[object, tuple[float, int, Candidate]] = {}
    in_order = ((jobs, each, policy) for jobs in Space(job, gpus).layouts() for each, policy in product(jobs, policies))
    for order, (jobs, each, policy) in enumerate(in_order):
        if policy == "planned" and each.parallel.context > 1:
            continue
        stages_s, least_update_s = running._cost(each).stages_s(each), update_s(jobs[-1], running._cost(jobs[-1]).profile)
        *_, looks = running._floored(each.model_copy(update={"policy": policy}), stages_s, least_update_s)
        *_, found = [None, *looks]
        if isinstance(found, Candidate):
            key = (round(found.step_s, 12), order, found)
            best[each.parallel] = min(best.get(each.parallel, key), key, key=lambda known: known[:2])
    return [candidate for *_, candidate in sorted(best.values(), key=lambda known: known[:2])]


@pytest.mark.parametrize("memory_gib", [TIGHT_GIB, *long(60.0)])
@pytest.mark.slow
def test_nothing_that_wins_is_left_out(memory_gib: float) -> None:
    job = with_budget(small_job(seq=4096, layers=16), memory_gib)
    expected = everything(job, 8, STOCK)
    for top in (1, 5, 1000):
        found = search(job, 8, top=top, policies=STOCK).candidates
        assert [each.job for each in found] == [each.job for each in expected[:top]]
        assert [each.step_s for each in found] == pytest.approx([each.step_s for each in expected[:top]])


@pytest.mark.slow
def test_nothing_that_wins_with_a_plan_is_left_out() -> None:
    job = with_budget(small_job(seq=4096, batch=4, layers=4), 8.0)
    expected = everything(job, 4, ("full", "planned"))
    found = search(job, 4, top=12, policies=("full", "planned")).candidates
    assert {each.job.policy for each in found} == {"full", "planned"}
    assert {each.job for each in found} == {each.job for each in expected[:12]}
    for shown, ranked in zip(found, expected, strict=False):
        assert shown.step_s <= ranked.step_s * (1 + 1e-6), "what is shown is decided as plan does, which is no slower"


def test_plans_for_cut_sequences_are_looked_at_where_they_are_asked_for() -> None:
    job = small_job(seq=4096, batch=4, layers=4)
    job = job.model_copy(update={"model": job.model.model_copy(update={"implementation": "transformer_engine"})})
    usual, asked = (search(job, 4, top=1000, contexts=contexts) for contexts in (None, (2,)))
    planned_for = {each.job.parallel.context for each in usual.candidates if each.job.policy == "planned"}
    assert planned_for <= {1}
    assert {each.job.parallel.context for each in asked.candidates} == {2}
    with pytest.raises(ConfigError, match="--context: found 0, 2, needed sizes of at least 1"):
        search(job, 4, contexts=(2, 0))


def test_a_job_without_flushes_is_not_ranked() -> None:
    job = small_job(seq=4096, batch=8, layers=4).model_copy(update={"schedule": "double_buffered"})
    with pytest.raises(ConfigError, match="job: schedule: found double_buffered, needed flush"):
        search(job, 4)


@pytest.fixture(scope="module")
def tight() -> Ranking:
    return search(with_budget(small_job(seq=4096, layers=16), TIGHT_GIB), 8, top=12)


def test_candidates_fit_and_come_in_order(tight: Ranking) -> None:
    assert len(tight.candidates) == 12
    assert [each.step_s for each in tight.candidates] == sorted(each.step_s for each in tight.candidates)
    assert all(each.memory_bytes <= tight.job.memory_budget_bytes for each in tight.candidates)
    assert len({each.job.parallel for each in tight.candidates}) == 12
    assert {each.job.gpus for each in tight.candidates} == {8}


def test_everybody_is_considered(tight: Ranking) -> None:
    assert tight.considered == len(POLICIES) * len(list(jobs_of(tight.job, 8)))


def test_the_same_answer_every_time(tight: Ranking) -> None:
    again = search(tight.job, 8, top=12)
    assert replace(again, seconds=0.0) == replace(tight, seconds=0.0)


def test_fewer_are_the_first_of_more(tight: Ranking) -> None:
    few = search(tight.job, 8, top=3)
    assert few.candidates == tight.candidates[:3]


def test_a_layout_that_cannot_be_planned_leaves_its_place_to_the_next(tight: Ranking, monkeypatch: pytest.MonkeyPatch) -> None:
    searching = import_module("megatron_lynx.search.search")
    first, planned = tight.candidates[0].job.parallel, searching._planned
    monkeypatch.setattr(searching, "_planned", lambda each: None if each.job.parallel == first else planned(each))
    assert search(tight.job, 8, top=11).candidates == tight.candidates[1:]


def test_what_it_says_is_what_an_estimate_says(tight: Ranking) -> None:
    """Of stock policies, which a launch can have: bytes and seconds, and it offloads nothing."""
    for each in search(tight.job, 8, policies=STOCK).candidates:
        said = estimate(Job.model_validate(each.job.model_dump(by_alias=True)))
        assert said.offload_ratio == each.offload_ratio == 0
        assert max(memory.total for memory in said.stages) == each.memory_bytes
        assert said.step.most_s == pytest.approx(each.step_s, rel=1e-9)


def test_what_it_says_of_a_plan_is_what_the_planner_says(tight: Ranking) -> None:
    best = next(each for each in tight.candidates if each.job.policy == "planned")
    decision = decide(best.job, analytic_profile(best.job))
    assert max(memory.total for memory in decision.memory) == best.memory_bytes
    assert decision.simulation.step_s <= best.step_s


def test_a_plan_is_never_slower_than_what_it_may_do() -> None:
    job = with_budget(small_job(seq=4096, layers=16), TIGHT_GIB)
    with_plans, without = (search(job, 8, top=1, policies=policies).candidates[0] for policies in (POLICIES, STOCK))
    assert with_plans.step_s <= without.step_s


def test_a_plan_that_needs_nothing_is_policy_none() -> None:
    """It is there under its own name if `none` was not asked for, and only then."""
    job = with_budget(small_job(seq=4096, layers=4), 60.0)
    kept, alone, both = (search(job, 4, top=1, policies=policies) for policies in (["none"], ["planned"], ["none", "planned"]))
    assert alone.candidates[0].job.policy == "planned"
    assert alone.candidates[0].job.parallel == kept.candidates[0].job.parallel
    assert alone.candidates[0].step_s == pytest.approx(kept.candidates[0].step_s, rel=0.01)
    assert both.candidates == kept.candidates


def test_more_memory_and_more_choice_cost_no_time() -> None:
    job = small_job(seq=4096, layers=16)
    steps = [search(with_budget(job, gib), 8, top=1, policies=STOCK).candidates[0].step_s for gib in (16.0, 24.0, 60.0)]
    assert steps == sorted(steps, reverse=True)
    assert search(job, 8, top=1, policies=["full"]).candidates[0].step_s >= steps[-1]


def test_nothing_fits_names_what_binds_and_what_would_help() -> None:
    job = catalogued_job("gpt-22b", "a100-80g", gpus=1, batch=4, parallel={}, policy="none")
    with pytest.raises(Infeasible) as refusal:
        search(job, 2)
    binding, *changes = refusal.value.problems
    assert binding.where.startswith("stage ")
    assert "optimizer" in binding.finding
    assert "too much" in binding.todo
    (more,) = (change for change in changes if change.where == "--gpus")
    assert search(job, int(more.needed), top=1, policies=STOCK).candidates


@pytest.mark.slow
def test_other_policies_are_changes_that_help() -> None:
    job = catalogued_job("gpt-175b", "a100-80g", gpus=1, batch=64, parallel={}, policy="none")
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"memory_gib": 80.0})})
    with pytest.raises(Infeasible) as refusal:
        search(job, 64, policies=["none"])
    changes = {problem.where: problem for problem in refusal.value.problems[1:]}
    assert set(changes) == {"--policies", "budget.memory_gib", "--gpus"}
    assert search(job, 64, policies=[changes["--policies"].needed], top=1).candidates


def test_the_budget_that_would_do_does() -> None:
    job = with_budget(small_job(seq=4096, layers=16), 7.5)
    with pytest.raises(Infeasible) as refusal:
        search(job, 8, policies=["full"])
    (more,) = (problem for problem in refusal.value.problems if problem.where == "budget.memory_gib")
    assert search(with_budget(job, float(more.needed) + 0.01), 8, policies=["full"], top=1).candidates


def test_nonsense_is_refused_all_at_once() -> None:
    job = small_job(budget={"activation_mib": 100})
    with pytest.raises(ConfigError) as refusal:
        search(job, 0, top=0, policies=["selectiv", "none"])
    found = {problem.where: problem for problem in refusal.value.problems}
    assert set(found) == {"--gpus", "--top", "--policies", "job: budget.activation_mib"}
    assert found["--policies"].todo == "did you mean selective?"


@pytest.mark.parametrize("gpus", [-8, 2**40])
def test_numbers_of_devices_that_nobody_has(gpus: int) -> None:
    with pytest.raises(ConfigError, match="makes no sense"):
        search(small_job(), gpus)


def test_what_does_not_divide_lists_what_does() -> None:
    with pytest.raises(ConfigError) as refusal:
        search(small_job(), 1021)
    (problem,) = refusal.value.problems
    nearest = [int(text) for text in problem.todo.split(": ")[1].split(", ")]
    assert 1024 in nearest
    for gpus in nearest:
        assert next(jobs_of(small_job(), gpus), None) is not None


@pytest.mark.parametrize(("more", "said"), [(1.005, "0.5 % more than the fastest"), (1.5, "")])
def test_a_search_says_that_its_fastest_are_within_the_error_of_ratios(tight: Ranking, more: float, said: str) -> None:
    first = tight.candidates[0]
    ranking = replace(tight, candidates=(first, replace(first, step_s=more * first.step_s)))
    assert said in ranking.within_error
    assert ("within the error of such ratios" in ranking.within_error) == bool(said)
