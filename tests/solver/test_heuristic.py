"""What any solver must have, on random problems, and the optimum by brute force on small ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.errors import Infeasible
from megatron_lynx.solver.answer import LayerChoice, Solved
from megatron_lynx.solver.baselines import keep_all, on_demand, replay_all
from megatron_lynx.solver.heuristic import least_memory, solve
from megatron_lynx.solver.problem import Choices
from tests.solver.problems import options, problems

TOLERANCE_S = 1e-9
random_problems = settings(max_examples=60, deadline=None)


def budgets(problem):
    """From what is needed at least to what keeping everything takes."""
    least, most = least_memory(problem).peak_bytes, keep_all(problem).peak_bytes
    return [replace(problem, budget_bytes=least + (most - least) * step // 5) for step in range(6)] if most > least else []


@random_problems
@given(problems())
def test_never_worse_than_the_same_kept_sets_on_demand(problem):
    for limited in budgets(problem):
        answer = solve(limited)
        assert answer.exposed_s <= on_demand(answer).exposed_s + TOLERANCE_S


@random_problems
@given(problems(window_s=st.just(0.0)))
def test_without_windows_everything_is_exposed(problem):
    for limited in budgets(problem):
        answer = solve(limited)
        assert answer.exposed_s == pytest.approx(sum(half.replay_s for half in answer.halves))
        assert answer.hidden_s == pytest.approx(0.0)


@random_problems
@given(problems(window_s=st.just(100.0)))
def test_free_where_windows_exceed_what_was_dropped(problem):
    answer = solve(problem)
    assert answer.exposed_s == 0
    for limited in budgets(replace(problem, attention=problem.attention.best_seated, mlp=problem.mlp.best_seated)):
        assert solve(replace(limited, budget_bytes=limited.budget_bytes)).exposed_s == 0


@random_problems
@given(problems())
def test_more_budget_never_costs_time(problem):
    answers = [solve(limited) for limited in budgets(problem)]
    for less, more in pairwise(answers):
        assert more.exposed_s <= less.exposed_s + TOLERANCE_S


@random_problems
@given(problems())
def test_an_answer_fits_its_budget_and_nothing_below_the_least_does(problem):
    for limited in budgets(problem):
        assert solve(limited).peak_bytes <= limited.budget_bytes
    least = least_memory(problem).peak_bytes
    assert solve(replace(problem, budget_bytes=least)).peak_bytes == least
    with pytest.raises(Infeasible):
        solve(replace(problem, budget_bytes=least - 1))


@random_problems
@given(problems(max_layers=5))
def test_as_good_as_every_answer_of_its_form(problem):
    for limited in budgets(problem):
        fitting = [answer for answer in answers_of_the_form(limited) if answer.peak_bytes <= limited.budget_bytes]
        assert solve(limited).exposed_s <= min((answer.exposed_s for answer in fitting), default=float("inf")) + TOLERANCE_S


def answers_of_the_form(problem):
    """Every X below every Y, by the definition in the solver's docstring."""
    some = [LayerChoice(*halves) for halves in product(problem.attention[::2], problem.mlp[::2])]
    for below, above, last, count in product(some, some, problem.last_mlp, range(problem.layers)):
        top = above if count else below
        layers = (below,) * (problem.layers - 1 - count) + (above,) * count
        yield Solved((*layers, LayerChoice(top.attention, last)), problem.in_flight)


@random_problems
@given(problems(max_layers=2))
def test_least_memory_is_the_least_of_all(problem):
    least = least_memory(problem).peak_bytes
    assert least <= keep_all(problem).peak_bytes
    assert least <= replay_all(problem).peak_bytes


def test_the_same_question_has_the_same_answer():
    problem = next(iter(budgets(example())))
    assert solve(problem) == solve(problem)


def example(window_s=1.0, layers=8):
    """Halves of 60 and 100 bytes beside their input; a second replays either."""
    from megatron_lynx.solver.problem import StageProblem

    attention, mlp = [(60, 1.0)], [(100, 1.0)]
    return StageProblem(
        stage=3, layers=layers, attention=options(attention, window_s), mlp=options(mlp, window_s), last_mlp=options(mlp, 0.0)
    )


def test_the_last_mlp_half_is_kept_where_that_costs_nothing_at_the_peak():
    answer = solve(example())
    assert [half.replay != () for half in answer.halves] == [True] * 15 + [False]
    assert answer.exposed_s == 0
    assert answer.peak_bytes == solve(replace(example(), last_mlp=Choices(example().last_mlp[1:]))).peak_bytes
    several = solve(replace(example(), in_flight=2))
    assert several.layers[-1].mlp.replay != (), "each micro-batch in flight would hold it"


def test_budget_that_suffices_for_some_layers_is_used_for_them():
    problem = example(window_s=0.0)
    least, one_mlp = solve(problem).peak_bytes, 100
    answer = solve(replace(problem, budget_bytes=least + 2 * one_mlp))
    assert answer.exposed_s < solve(problem).exposed_s
    assert [half.replay == () for half in answer.halves].count(True) >= 3


def test_infeasible_says_what_binds_and_by_how_much():
    problem = example()
    least = least_memory(problem).peak_bytes
    with pytest.raises(Infeasible) as refusal:
        solve(replace(problem, budget_bytes=least - 16))
    (found,) = refusal.value.problems
    assert found.where == "budget.activation_mib, stage 3"
    assert f"{least} B" in found.needed
    assert f"{least - 16} B" in found.found
    assert "raise it by 16 B" in found.todo
    assert refusal.value.exit_status == 1
