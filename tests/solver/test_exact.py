"""The exact solver against every answer there is, and on stages of real size; the sweep is never faster."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from megatron_lynx.errors import Infeasible
from megatron_lynx.solver import exact, sweep
from megatron_lynx.solver.baselines import keep_all, on_demand
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.units import format_bytes
from tests.solver.problems import budgets, catalogued, catalogued_problems, every_answer, options, problems

TOLERANCE_S = 1e-8


@settings(max_examples=25, deadline=None)
@given(problems(max_layers=2, most_parts=2))
def test_as_good_as_every_answer(problem):
    answers = every_answer(problem)
    assert exact.least_memory(problem).peak_bytes == min(answer.peak_bytes for answer in answers)
    for limited in budgets(problem):
        best_s = min(answer.exposed_s for answer in answers if answer.peak_bytes <= limited.budget_bytes)
        answer = exact.solve(limited)
        assert answer.proven
        assert answer.exposed_s == pytest.approx(best_s, abs=TOLERANCE_S)
        assert answer.peak_bytes <= limited.budget_bytes


@settings(max_examples=15, deadline=None, derandomize=True)
@given(catalogued_problems())
def test_proven_for_stages_of_real_size_and_never_slower_than_the_sweep(problem):
    answer = exact.solve(problem)
    assert answer.proven
    assert answer.peak_bytes <= problem.budget_bytes
    assert answer.exposed_s <= sweep.solve(problem).exposed_s
    assert answer.exposed_s <= on_demand(answer).exposed_s + TOLERANCE_S
    assert exact.solve(replace(problem)) == answer


def test_an_answer_that_is_a_few_bytes_too_large_does_not_hide_those_that_fit():
    """What HiGHS tolerates is some bytes of two gigabytes."""
    problem = replace(catalogued("Transformer Engine").of(3, 24), budget_bytes=2254444479)
    answer = exact.solve(problem)
    assert answer.proven
    assert answer.peak_bytes <= problem.budget_bytes


@settings(max_examples=10, deadline=None)
@given(problems(max_layers=6))
def test_more_budget_never_costs_time(problem):
    answers = [exact.solve(limited) for limited in budgets(problem, steps=4)]
    for less, more in pairwise(answers):
        assert more.exposed_s <= less.exposed_s + TOLERANCE_S
    assert answers[-1].exposed_s == 0


def test_layers_may_differ_where_no_two_sorts_of_them_are_as_fast():
    """Halves of 30 and of 100 bytes, four micro-batches in flight, and room for 440: that is no number of layers."""
    attention, mlp = options([(30, 1.0)], 0.0), options([(100, 3.5)], 0.0)
    problem = StageProblem(0, 8, attention, mlp, mlp, in_flight=4)
    limited = replace(problem, budget_bytes=exact.least_memory(problem).peak_bytes + 4 * 440)
    found, swept = exact.solve(limited), sweep.solve(limited)
    assert found.proven
    assert found.exposed_s < swept.exposed_s
    assert swept.gap is None


def test_without_a_budget_the_least_memory():
    problem = options([(60, 1.0)], 1.0)
    problem = StageProblem(0, 3, problem, problem, problem, in_flight=2)
    answer = exact.solve(problem)
    assert answer.peak_bytes <= sweep.solve(problem).peak_bytes
    assert answer.proven


def test_infeasible_by_a_byte_is_said_exactly():
    attention, mlp = options([(60, 1.0)], 1.0), options([(100, 1.0)], 1.0)
    problem = StageProblem(2, 5, attention, mlp, mlp, in_flight=3)
    least = exact.least_memory(problem).peak_bytes
    assert exact.solve(replace(problem, budget_bytes=least)).peak_bytes == least
    with pytest.raises(Infeasible, match=f"at least {format_bytes(least)}.*raise it by 1 B"):
        exact.solve(replace(problem, budget_bytes=least - 1))


def test_where_little_is_searched_the_gap_is_stated():
    attention, mlp = options([(30, 1.0), (7, 0.5)], 0.3), options([(100, 1.0), (11, 0.2)], 0.1)
    problem = StageProblem(0, 8, attention, mlp, mlp, in_flight=2)
    limited = replace(problem, budget_bytes=(exact.least_memory(problem).peak_bytes + keep_all(problem).peak_bytes) // 2)
    hurried, proven = exact.solve(limited, nodes=0), exact.solve(limited)
    assert hurried.gap is not None
    assert hurried.exposed_s * (1 - hurried.gap) <= proven.exposed_s + TOLERANCE_S <= hurried.exposed_s + 2 * TOLERANCE_S


@pytest.mark.parametrize("seconds", [0.0, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize("size", [0, 10**30])
@pytest.mark.parametrize("budget", [-1, 0, 10**31])
def test_figures_nobody_can_mean_are_answered(seconds, size, budget):
    choices = options([(size, seconds)], 1.0, seconds)
    problem = StageProblem(0, 3, choices, choices, choices, in_flight=3, budget_bytes=budget)
    if budget < exact.least_memory(problem).peak_bytes:
        with pytest.raises(Infeasible):
            exact.solve(problem)
    else:
        assert exact.solve(problem).peak_bytes <= budget
