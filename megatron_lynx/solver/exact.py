"""The exact solver: every half of every layer has its own items and seat, and no answer is faster (Lynx's OPT, our formulation).

    halves that backward reaches first, one by one          1 ──> 2 ──> 4 ──> ... ──> all
                                                            │     │
    integer program without the needs of the others ──> bound: no answer is faster
      └── its choice, the others in the best known order ──> answer, if it keeps the budget
                                                            an answer no slower than the best bound is proven

Backward holds most near its beginning, so few halves suffice, and identical layers need not be distinguished. With all halves the
program is complete. The search starts at the sweep's answer and returns it if none is faster. It ends after a number of nodes in
HiGHS's tree, not after a time, so a busy machine makes the same plan.

If small gains are not needed, at most `MOST_CHOSEN` halves are chosen one by one; four times as many take HiGHS fifty times as
long. The programs' answers may exceed the budget, because they omit the needs of halves that are only counted. `mended` then
changes half after half until the budget is kept:

    moments of a backward     ▂▄██▇▆▅▃▂▁     bytes held at each [A] [B] (`cost.memory`)
    the budget                ──────────     excess: the sum over all moments
    a change of one half      ▂▄▆▆▇▆▅▃▂▁     costs seconds and reduces the excess; the cheapest is made, then the next

The cheapest change depends on the weight of bytes against seconds (`WEIGHTS`): with 1 each byte counts the same; with more,
changes that remove many bytes at once come first. Several weights are tried, because none is always best.
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
"""Most halves chosen one by one if small gains are not needed."""

MOST_NODES = 5_000
"""Most nodes of HiGHS's search trees for one answer."""

SAME = 1e-6
"""Relative difference of costs below which answers are equally good: HiGHS computes in floats."""

SAME_S, SAME_BYTES = 1e-9, 1.0
"""Absolute differences below which answers are equally good."""


def solve(problem: StageProblem, nodes: int = MOST_NODES, enough_s: float = 0.0, quick: Solver = sweep.solve) -> Solved:
    """Return the fastest answer: `proven` (to a millionth), or with the `gap` that a faster one could save at most.

    The search stops at gains of at most `enough_s`. Without a budget, the least memory is sought, with every recomputation in the
    window of its backward that hides most. Stages with experts are left to `quick`. Raises `Infeasible` if nothing fits, or
    nothing was found within `nodes`.

    quick: the sweep, which may remember its answers.
    """
    if problem.mixed is not None:
        return quick(problem)
    if problem.budget_bytes is None:
        seated = problem.plain.best_seated
        problem = replace(seated, budget_bytes=least_memory(seated, nodes).peak_bytes)
    swept = _by_sweep(problem, quick)
    if swept is not None and swept.grouped:  # nothing else fits, and no program covers groups of layers
        return swept
    search = _Search(problem, "time", swept, _least_s(problem), enough=enough_s)
    search.go(nodes)
    if search.answer is None:
        raise infeasible(problem, least_memory(problem, nodes)) if search.hopeless else _not_found(problem, nodes)
    return replace(search.answer, gap=search.gap)


def least_memory(problem: StageProblem, nodes: int = MOST_NODES) -> Solved:
    """Return the answer with the least peak."""
    if problem.mixed is not None:
        return sweep.least_memory(problem)
    search = _Search(problem, "memory", sweep.least_memory(problem), 0.0)
    search.go(nodes)
    assert search.answer is not None
    return search.answer


@dataclass
class _Search:
    """The best answer so far, and a lower bound (seconds or bytes)."""

    problem: StageProblem
    goal: Goal
    answer: Solved | None
    bound: float
    """Lower bound of all answers."""
    hopeless: bool = False
    enough: float = 0.0
    """Gain that is not worth a search."""

    def go(self, nodes: int) -> None:
        halves, loose = len(HALVES) * self.problem.layers, list[Solved]()
        for explicit in _rounds(halves):
            if self.enough and explicit > MOST_CHOSEN:
                break
            result = Programme(self.problem, explicit).solved(self.goal, nodes, self._enough_share)
            nodes -= result.nodes
            self.hopeless = not result.possible
            self.bound = max(self.bound, result.bound)
            if result.answer is not None:
                self._take(result.answer)
                loose.append(result.answer)
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
        """The same as a fraction of the answer's cost."""
        cost = 0.0 if self.answer is None else self._cost(self.answer)
        return self.enough / abs(cost) if cost else 0.0

    @property
    def _near(self) -> bool:
        """Whether no gain that is worth a search remains."""
        return self.answer is not None and self._cost(self.answer) - self.bound <= self.enough

    @property
    def gap(self) -> float | None:
        """Fraction of the answer's cost that another one could save; None without an answer."""
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
    """Yield how many halves are chosen one by one."""
    explicit = 1
    while explicit < halves:
        yield explicit
        explicit *= 2
    yield halves


def _least_s(problem: StageProblem) -> float:
    """Return a lower bound: the seconds if every half took its fastest option."""
    return sum(float(choices.columns.longer_s.min()) for choices in problem.halves)


def _by_sweep(problem: StageProblem, quick: Solver) -> Solved | None:
    try:
        return quick(problem)
    except Infeasible:
        return None


def _not_found(problem: StageProblem, nodes: int) -> Infeasible:
    outcome = f"nothing was found that fits {format_bytes(problem.budget_bytes or 0)}, nor that nothing does"
    return Infeasible(
        "no plan was found", [Problem(f"stage {problem.stage}", f"{outcome} ({nodes} nodes searched)", "", "raise the budget")]
    )


WEIGHTS = (1.0, 1.5)
"""Weights of bytes against seconds."""

FREE_S = 1e-12
"""Cost of changes that take no longer."""


def mended(problem: StageProblem, answer: Solved) -> Solved | None:
    """Return the fastest answer within the budget that this one can be changed into, or None."""
    if any(option.joined for option in answer.halves):
        return None  # changes are made half by half
    mender = _Mender(problem)
    candidates = [candidate for weight in WEIGHTS if (candidate := mender.mended(answer, weight)) is not None]
    return min(candidates, key=lambda candidate: candidate.longer_s, default=None)


@dataclass(frozen=True)
class _Mender:
    """Changes answers to one problem. Halves are in backward order."""

    problem: StageProblem

    def mended(self, answer: Solved, weight: float) -> Solved | None:
        backward = list(answer.halves[::-1])
        columns = Choices(backward).columns
        seconds = columns.longer_s.copy()
        held = np.array([self._adds(columns.at(np.array([half])), half)[0] for half in range(len(backward))])
        while (change := self._change(seconds, held, weight)) is not None:
            half, option = change
            backward[half] = self._offered[half][option]
            seconds[half], held[half] = self._seconds[half, option], self._bytes[half, option]
        mended_answer = Solved(layers_of(backward[::-1]), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)
        return mended_answer if mended_answer.peak_bytes <= (self.problem.budget_bytes or 0) else None

    def _change(self, seconds: Floats, held: Floats, weight: float) -> tuple[int, int] | None:
        """Return the next half to change and its option; None if nothing exceeds the budget or no change helps. `held`: by half
        and moment."""
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
        """Return the excess over the budget, summed over all moments."""
        return np.asarray(np.maximum(0.0, held - float(self.problem.budget_bytes or 0)).sum(axis=-1))

    @cached_property
    def _offered(self) -> list[Choices]:
        return [choices.unbeaten.apart for choices in self.problem.halves[::-1]]

    @cached_property
    def _seconds(self) -> Floats:
        """By half and option; infinite if a half has fewer options than others."""
        seconds = np.full((len(self._offered), max(map(len, self._offered))), np.inf)
        for half, choices in enumerate(self._offered):
            seconds[half, : len(choices)] = choices.columns.longer_s
        return seconds

    @cached_property
    def _bytes(self) -> Floats:
        """By half, option and moment: added bytes."""
        table = np.zeros((*self._seconds.shape, 1 + 2 * len(self._offered)))
        for half, choices in enumerate(self._offered):
            table[half, : len(choices)] = self._adds(choices.columns, half)
        return table

    def _adds(self, columns: Columns, half: int) -> Floats:
        beside_bytes = (self.problem.in_flight - 1) * columns.resident
        return np.asarray(beside_bytes[:, None] + held_by_one(columns.moments, half, len(self._offered)))
