"""The exact solver: every half of every layer has its own items and seat, and no answer is faster (Lynx's OPT, our formulation).

    first halves that backward reaches, one by one          1 ──> 2 ──> 4 ──> ... ──> all
                                                            │     │
    integer programme without the needs of the others ──> bound: no answer is faster
      └── its choice, the others in the best order we know ──> answer, if it keeps within the budget
                                                            the best answer is no slower than the best bound: proven

Backward holds most near its beginning, so a few halves suffice, and of identical layers no two are told apart without need. With
all halves nothing is left out. The sweep's answer is where the search begins, and what is returned where nothing is faster;
else the first one that was found. A search ends by nodes of HiGHS's tree, not by the clock: a busy machine makes the same plan.

Where something need not be gained, no more than `MOST_CHOSEN` halves are chosen one by one: four times as many take HiGHS fifty
times as long. What the programmes found is nearly right, but holds too much, because they leave out when the halves that they
only count need most. So it is changed until it keeps the budget, one half after the other (`mended`):

    moments of a backward     ▂▄██▇▆▅▃▂▁     what is held at each [A] [B] (`cost.memory`)
    the budget                ──────────     beyond it: all that is too much at any moment, added up
    a change of one half      ▂▄▆▆▇▆▅▃▂▁     costs seconds, and takes some of that away; the cheapest is made, then the next one

What is cheapest depends on what bytes count beside seconds (`WEIGHTS`): with 1 a byte is worth the same wherever it is taken,
with more those changes come first that take much away at once. No weight is always the best, so several are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from megatron_lynx.anatomy import HALVES
from megatron_lynx.cost.memory import held_by_one
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.solver import sweep
from megatron_lynx.solver.answer import Solved, Solver, infeasible, layers_of
from megatron_lynx.solver.problem import Choices, Columns, Floats, StageProblem
from megatron_lynx.solver.programme import Goal, Programme
from megatron_lynx.units import format_bytes

MOST_CHOSEN = 8
"""How many halves are chosen one by one at most, where something need not be gained."""

MOST_NODES = 5_000
"""Of HiGHS's search trees, for one answer. Plans of the bundled jobs take 106 at most."""

SAME = 1e-6
"""Answers whose costs differ by a smaller part than this are equally good: HiGHS counts in floats."""

SAME_S, SAME_BYTES = 1e-9, 1.0
"""So are answers that differ by less than this."""


def solve(problem: StageProblem, nodes: int = MOST_NODES, enough_s: float = 0.0, quick: Solver = sweep.solve) -> Solved:
    """The fastest answer: `proven` (to a millionth), or its `gap` says what part of its seconds a faster one could save at most.
    It is not looked for where it could save no more than `enough_s`. `quick`: the sweep, which may remember its answers.

    Without a budget the least memory is wanted, with every replay in the window of its backward that hides most of it. Stages
    with experts are left to `quick`. Raises `Infeasible` where nothing fits, or nothing was found in so many `nodes`.
    """
    if problem.mixed is not None:
        return quick(problem)
    if problem.budget_bytes is None:
        seated = problem.plain.best_seated
        problem = replace(seated, budget_bytes=least_memory(seated, nodes).peak_bytes)
    swept = _by_sweep(problem, quick)
    if swept is not None and swept.grouped:  # nothing else fits, and no programme knows groups of layers
        return swept
    search = _Search(problem, "time", swept, _least_s(problem), enough=enough_s)
    search.go(nodes)
    if search.answer is None:
        raise infeasible(problem, least_memory(problem, nodes)) if search.hopeless else _not_found(problem, nodes)
    return replace(search.answer, gap=search.gap)


def least_memory(problem: StageProblem, nodes: int = MOST_NODES) -> Solved:
    """The answer that holds least, whatever it exposes."""
    if problem.mixed is not None:
        return sweep.least_memory(problem)
    search = _Search(problem, "memory", sweep.least_memory(problem), 0.0)
    search.go(nodes)
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

    def go(self, nodes: int) -> None:
        halves, loose = len(HALVES) * self.problem.layers, list[Solved]()
        for explicit in _rounds(halves):
            if self.enough and explicit > MOST_CHOSEN:
                break
            found = Programme(self.problem, explicit).solved(self.goal, nodes, self._enough_share)
            nodes -= found.nodes
            self.hopeless = not found.possible
            self.bound = max(self.bound, found.bound)
            if found.answer is not None:
                self._take(found.answer)
                loose.append(found.answer)
            if self.hopeless or self.gap == 0 or self._near or nodes <= 0:
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


def _by_sweep(problem: StageProblem, quick: Solver) -> Solved | None:
    try:
        return quick(problem)
    except Infeasible:
        return None


def _not_found(problem: StageProblem, nodes: int) -> Infeasible:
    found = f"nothing was found that fits {format_bytes(problem.budget_bytes or 0)}, nor that nothing does"
    return Infeasible(
        "no plan was found", [Problem(f"stage {problem.stage}", f"{found} ({nodes} nodes searched)", "", "raise the budget")]
    )


WEIGHTS = (1.0, 1.5)
"""What bytes count beside seconds."""

FREE_S = 1e-12
"""A change that takes no longer than this, or less time than before, is taken to cost so much."""


def mended(problem: StageProblem, answer: Solved) -> Solved | None:
    """The fastest of those answers that keep the budget into which this one can be changed; None where there is none."""
    if any(option.joined for option in answer.halves):
        return None  # it changes one half after the other
    mender = _Mender(problem)
    found = [each for weight in WEIGHTS if (each := mender.mended(answer, weight)) is not None]
    return min(found, key=lambda each: each.longer_s, default=None)


@dataclass(frozen=True)
class _Mender:
    """Changes answers to one problem. Halves are in the order of a backward."""

    problem: StageProblem

    def mended(self, answer: Solved, weight: float) -> Solved | None:
        backward = list(answer.halves[::-1])
        own = Choices(backward).columns
        seconds = own.longer_s.copy()
        held = np.array([self._adds(own.at(np.array([half])), half)[0] for half in range(len(backward))])
        while (change := self._change(seconds, held, weight)) is not None:
            half, option = change
            backward[half] = self._offered[half][option]
            seconds[half], held[half] = self._seconds[half, option], self._bytes[half, option]
        found = Solved(layers_of(backward[::-1]), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)
        return found if found.peak_bytes <= (self.problem.budget_bytes or 0) else None

    def _change(self, seconds: Floats, held: Floats, weight: float) -> tuple[int, int] | None:
        """The next half to change, and the number of its option; None where nothing is too much, or no change takes anything
        away. `held`: by half and moment."""
        together = held.sum(axis=0)
        together[0] += self.problem.loss_bytes
        too_much = self._beyond(together)
        if not too_much:
            return None
        taken_away = too_much - self._beyond(together + (self._bytes - held[:, None]))
        dearer_s = np.maximum(self._seconds - seconds[:, None], FREE_S)
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(taken_away > 0, dearer_s / taken_away**weight, np.inf)
        half, option = divmod(int(price.argmin()), price.shape[1])
        return (half, option) if np.isfinite(price[half, option]) else None

    def _beyond(self, held: Floats) -> Floats:
        """All that is too much at any moment, added up over the moments."""
        return np.asarray(np.maximum(0.0, held - float(self.problem.budget_bytes or 0)).sum(axis=-1))

    @cached_property
    def _offered(self) -> list[Choices]:
        return [choices.unbeaten.apart for choices in self.problem.halves[::-1]]

    @cached_property
    def _seconds(self) -> Floats:
        """By half and option; no time is long enough where a half has fewer options than others."""
        seconds = np.full((len(self._offered), max(map(len, self._offered))), np.inf)
        for half, choices in enumerate(self._offered):
            seconds[half, : len(choices)] = choices.columns.longer_s
        return seconds

    @cached_property
    def _bytes(self) -> Floats:
        """By half, option and moment: what it adds to what is held then."""
        table = np.zeros((*self._seconds.shape, 1 + 2 * len(self._offered)))
        for half, choices in enumerate(self._offered):
            table[half, : len(choices)] = self._adds(choices.columns, half)
        return table

    def _adds(self, columns: Columns, half: int) -> Floats:
        others = (self.problem.in_flight - 1) * columns.resident
        return np.asarray(others[:, None] + held_by_one(columns.moments, half, len(self._offered)))
