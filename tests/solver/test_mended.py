"""Answers that hold too much are changed until they keep the budget; a search that need not gain everything stays small."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from megatron_lynx.solver import exact, sweep
from megatron_lynx.solver.answer import Remembering
from megatron_lynx.solver.baselines import keep_all
from megatron_lynx.solver.exact import mended
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.programme import Programme
from tests.solver.problems import budgets, options, problems

SOMETHING_S = 1e-6
"""So little need not be gained."""


@settings(max_examples=25, deadline=None)
@given(problems(max_layers=4))
def test_what_is_mended_keeps_the_budget_and_is_an_answer_to_the_problem(problem):
    for limited in budgets(problem, steps=4):
        found = mended(limited, keep_all(limited))
        assert found is None or found.peak_bytes <= limited.budget_bytes
        assert found is None or all(half in choices for half, choices in zip(found.halves, limited.halves, strict=True))


def test_what_keeps_the_budget_is_left_as_it_is():
    attention, mlp = options([(30, 1.0)], 0.0), options([(100, 3.5)], 0.0)
    problem = StageProblem(0, 8, attention, mlp, mlp, in_flight=4)
    everything = keep_all(problem)
    assert mended(replace(problem, budget_bytes=everything.peak_bytes), everything) == everything


def test_what_nothing_brings_below_the_budget_is_not_mended():
    attention, mlp = options([(30, 1.0)], 0.0), options([(100, 3.5)], 0.0)
    problem = StageProblem(0, 8, attention, mlp, mlp, in_flight=4)
    least = exact.least_memory(problem).peak_bytes
    assert mended(replace(problem, budget_bytes=least - 1), keep_all(problem)) is None


def test_the_change_that_costs_least_for_its_bytes_is_made_first():
    """An attention half lets go of 30 bytes in 1 s, an MLP half of 100 in 3.5 s; one attention half is enough."""
    attention, mlp = options([(30, 1.0)], 0.0), options([(100, 3.5)], 0.0)
    problem = StageProblem(0, 8, attention, mlp, mlp, in_flight=4)
    everything = keep_all(problem)
    found = mended(replace(problem, budget_bytes=everything.peak_bytes - 80), everything)
    assert found is not None
    assert found.exposed_s == pytest.approx(1.0)


def test_where_something_need_not_be_gained_few_halves_are_chosen_one_by_one(monkeypatch):
    """Thirty-two took HiGHS 1.4 s of the 2 s in which a plan for Llama 3 70B was made."""
    attention, mlp = options([(30, 1.0), (7, 0.5)], 0.3), options([(100, 1.0), (11, 0.2)], 0.1)
    problem = StageProblem(0, 24, attention, mlp, mlp, in_flight=5)
    least, most = exact.least_memory(problem).peak_bytes, keep_all(problem).peak_bytes
    asked: list[int] = []
    solved = Programme.solved

    def counted(programme, *arguments):
        asked.append(programme.explicit)
        return replace(solved(programme, *arguments), bound=float("-inf"))

    monkeypatch.setattr(Programme, "solved", counted)
    for share in (0.1, 0.4, 0.7):
        limited = replace(problem, budget_bytes=least + int(share * (most - least)))
        answer = exact.solve(limited, enough_s=SOMETHING_S)
        assert answer.peak_bytes <= limited.budget_bytes
        assert answer.longer_s <= sweep.solve(limited).longer_s
    assert max(asked) == exact.MOST_CHOSEN


def test_the_same_problem_is_solved_once():
    attention, mlp = options([(30, 1.0)], 0.0), options([(100, 3.5)], 0.0)
    problem = StageProblem(0, 3, attention, mlp, mlp, in_flight=2, budget_bytes=10**6)
    asked = []
    solver = Remembering(lambda each: asked.append(each) or sweep.solve(each))
    assert solver(problem) is solver(replace(problem))
    solver(replace(problem, budget_bytes=10**5))
    solver(replace(problem, mlp=options([(90, 3.5)], 0.0)))
    assert len(asked) == 3, "another budget, and other choices, are other problems"
