"""The exact solver: every half of every layer has its own items and seat, and no answer is faster (Lynx's OPT, our formulation).

    first halves that backward reaches, one by one          1 ──> 2 ──> 4 ──> ... ──> all
                                                            │     │
    integer programme without the needs of the others ──> bound: no answer is faster
      └── its choice, the others in the best order we know ──> answer, if it keeps within the budget
                                                            the best answer is no slower than the best bound: proven

Backward holds most near its beginning, so a few halves suffice, and of identical layers no two are told apart without need. With
all halves nothing is left out. The heuristic's answer is where the search begins, and what is returned where nothing is faster;
else the first one that was found. HiGHS is deterministic as long as time does not run out.

Where something need not be gained, no more than `MOST_CHOSEN` halves are chosen one by one: four times as many take HiGHS fifty
times as long. What the programmes found is changed until it keeps the budget (`mended`), and the fastest of that is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from megatron_lynx.anatomy import HALVES
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.solver import sweep
from megatron_lynx.solver.answer import Solved, Solver, infeasible
from megatron_lynx.solver.mended import mended
from megatron_lynx.solver.problem import StageProblem
from megatron_lynx.solver.programme import Goal, Programme
from megatron_lynx.units import format_bytes

MOST_CHOSEN = 8
"""How many halves are chosen one by one at most, where something need not be gained."""

SAME = 1e-6
"""Answers whose costs differ by a smaller part than this are equally good: HiGHS counts in floats."""

SAME_S, SAME_BYTES = 1e-9, 1.0
"""So are answers that differ by less than this."""


def solve(problem: StageProblem, time_limit_s: float = 10.0, enough_s: float = 0.0, quick: Solver = sweep.solve) -> Solved:
    """The fastest answer: `proven` (to a millionth), or its `gap` says what part of its seconds a faster one could save at most.
    It is not looked for where it could save no more than `enough_s`. `quick`: the heuristic, which may remember its answers.

    Without a budget the least memory is wanted, with every replay in the window of its backward that hides most of it. Stages
    with experts are left to `quick`. Raises `Infeasible` where nothing fits, or nothing was found in time.
    """
    if problem.mixed is not None:
        return quick(problem)
    deadline = time.monotonic() + time_limit_s
    if problem.budget_bytes is None:
        seated = problem.best_seated
        problem = replace(seated, budget_bytes=least_memory(seated, time_limit_s).peak_bytes)
    search = _Search(problem, "time", _by_heuristic(problem, quick), _least_s(problem), enough=enough_s)
    search.go(deadline)
    if search.answer is None:
        raise infeasible(problem, least_memory(problem, time_limit_s)) if search.hopeless else _not_found(problem, time_limit_s)
    return replace(search.answer, gap=search.gap)


def least_memory(problem: StageProblem, time_limit_s: float = 10.0) -> Solved:
    """The answer that holds least, whatever it exposes."""
    if problem.mixed is not None:
        return sweep.least_memory(problem)
    search = _Search(problem, "memory", sweep.least_memory(problem), 0.0)
    search.go(time.monotonic() + time_limit_s)
    assert search.answer is not None
    return search.answer


@dataclass
class _Search:
    """The best answer so far, and what none is better than (seconds or bytes)."""

    problem: StageProblem
    goal: Goal
    answer: Solved | None
    bound: float
    """No answer is below it."""
    hopeless: bool = False
    enough: float = 0.0
    """What need not be gained."""

    def go(self, deadline: float) -> None:
        halves, loose = len(HALVES) * self.problem.layers, list[Solved]()
        for explicit in _rounds(halves):
            if self.enough and explicit > MOST_CHOSEN:
                break
            found = Programme(self.problem, explicit).solved(self.goal, deadline - time.monotonic(), self._enough_share)
            self.hopeless = not found.possible
            self.bound = max(self.bound, found.bound)
            if found.answer is not None:
                self._take(found.answer)
                loose.append(found.answer)
            if self.hopeless or self.gap == 0 or self._near or time.monotonic() >= deadline:
                return
        for answer in loose:
            if (kept := mended(self.problem, answer)) is not None:
                self._take(kept)

    def _take(self, answer: Solved) -> None:
        if self._better(answer):
            self.answer = answer

    @property
    def _enough_share(self) -> float:
        """The part of the answer's cost that need not be gained."""
        cost = 0.0 if self.answer is None else self._cost(self.answer)
        return self.enough / abs(cost) if cost else 0.0

    @property
    def _near(self) -> bool:
        """Whether nothing that is worth it can be gained any more."""
        return self.answer is not None and self._cost(self.answer) - self.bound <= self.enough

    @property
    def gap(self) -> float | None:
        """The part of the answer's cost by which another one could be better; None where there is no answer."""
        if self.answer is None:
            return None
        cost = self._cost(self.answer)
        same = cost - self.bound <= max(SAME * abs(cost), SAME_S if self.goal == "time" else SAME_BYTES)
        return 0.0 if same else (cost - self.bound) / abs(cost) if cost else inf

    def _better(self, answer: Solved) -> bool:
        budget_bytes = self.problem.budget_bytes
        if self.goal == "time" and budget_bytes is not None and answer.peak_bytes > budget_bytes:
            return False
        if self.answer is None:
            return True
        gained = self._cost(self.answer) - self._cost(answer)
        return gained > (SAME_S if self.goal == "time" else 0)

    def _cost(self, answer: Solved) -> float:
        return answer.longer_s if self.goal == "time" else answer.peak_bytes


def _rounds(halves: int) -> Iterator[int]:
    """How many halves are chosen one by one."""
    explicit = 1
    while explicit < halves:
        yield explicit
        explicit *= 2
    yield halves


def _least_s(problem: StageProblem) -> float:
    """No answer is faster than if every half took its fastest option, whatever that holds."""
    return sum(float(choices.columns.longer_s.min()) for choices in problem.halves)


def _by_heuristic(problem: StageProblem, quick: Solver) -> Solved | None:
    try:
        return quick(problem)
    except Infeasible:
        return None


def _not_found(problem: StageProblem, time_limit_s: float) -> Infeasible:
    found = f"nothing was found that fits {format_bytes(problem.budget_bytes or 0)}, nor that nothing does"
    return Infeasible(
        "no plan was found", [Problem(f"stage {problem.stage}", f"{found} ({time_limit_s:g} s)", "", "allow more time")]
    )
