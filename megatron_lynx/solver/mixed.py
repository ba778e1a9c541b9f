"""Solves stages with experts, whose layers differ: each kind of half has its own choice, and lower layers may have another.

    kinds of halves      attention   attention below experts   MLP   last MLP   experts   last experts
    [1] all alike        every combination of what no other option of its kind beats   ──> the fastest that fits
    [2] two sorts        the first k layers as a faster combination that does not fit, those above as one that does:
                         the largest k that keeps within the budget
    [3] one price        all kinds pay the same for a byte (`solver.one_price`); two sorts, before and behind the last step

Peaks of all combinations are worked out side by side, half by half in backward order, as `cost.memory.peak_bytes` does for one.
How far the answer is from the best is unknown (`Solved.gap`), and replays of cool-down do not share a receive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress, cycle
from math import prod

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.solver.answer import Solved, infeasible, layers_of
from megatron_lynx.solver.one_price import at_rising_prices
from megatron_lynx.solver.problem import Choices, Columns, Floats, StageProblem, unbeaten
from megatron_lynx.units import SECOND_DIGITS

MOST_COMBINATIONS = 20_000
"""Beyond it, options that only differ in when they hold what are not told apart; beyond it even so, every second one of the kinds
that have most is left out."""

MOST_OF_A_SORT = 4
"""Combinations of either sort that are put together."""

Numbers = NDArray[np.intp]


def solve(problem: StageProblem) -> Solved:
    """The fastest answer of these forms that fits; without a budget the one that holds least. Raises `Infeasible`."""
    if problem.budget_bytes is None:
        return least_memory(problem.best_seated)
    answers = [*_of_combinations(problem, problem.budget_bytes), *_at_one_price(problem, problem.budget_bytes)]
    if not answers:
        raise infeasible(problem, least_memory(problem))
    return min(answers, key=lambda answer: (round(answer.longer_s, SECOND_DIGITS), answer.peak_bytes))


def _of_combinations(problem: StageProblem, budget_bytes: int) -> Iterator[Solved]:
    """[1] [2]"""
    alike = Combinations(problem)
    fitting = np.flatnonzero(alike.peak_bytes <= budget_bytes)
    if not len(fitting):
        return
    fitting = fitting[np.lexsort((alike.resident[fitting], alike.peak_bytes[fitting], alike.longer_s[fitting]))]
    faster = np.flatnonzero((alike.peak_bytes > budget_bytes) & (alike.longer_s < alike.longer_s[fitting[0]]))
    faster = faster[np.lexsort((alike.longer_s[faster], alike.peak_bytes[faster]))]
    yield alike.answer(int(fitting[0]))
    yield from _of_two_sorts(alike, fitting, faster)


def least_memory(problem: StageProblem) -> Solved:
    """The answer with all halves of a kind alike that has the least peak, then the least exposed seconds."""
    alike = Combinations(problem)
    return alike.answer(int(np.lexsort((alike.resident, alike.longer_s, alike.peak_bytes))[0]))


@dataclass(frozen=True)
class Combinations:
    """One option for each kind of half, in every combination."""

    problem: StageProblem

    def answer(self, number: int) -> Solved:
        forward = [self.kinds[kind][self._picked[kind][number]] for kind in self._kind_of_half]
        return Solved(layers_of(forward), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)

    @cached_property
    def longer_s(self) -> Floats:
        return np.round(sum((columns.longer_s for columns in self._halves), np.zeros(self._size)), SECOND_DIGITS)

    @cached_property
    def resident(self) -> Floats:
        return np.asarray(sum((columns.resident for columns in self._halves), np.zeros(self._size)))

    @cached_property
    def peak_bytes(self) -> Floats:
        """[A] [B] of `cost.memory`."""
        backward = self._halves[::-1]
        behind = sum((columns.held for columns in backward), np.zeros(self._size))
        peak = behind + self.problem.loss_bytes
        for number, half in enumerate(backward):
            following = backward[number + 1 : number + 3]
            begins = sum((each.ahead2 for each in following[:1]), sum(each.ahead4 for each in following[1:]))
            ends = sum((each.ahead for each in following[:1]), sum(each.ahead3 for each in following[1:]))
            behind = behind - half.held
            peak = np.maximum(peak, behind + np.maximum(half.whole + begins, half.tail + ends))
        return np.asarray(peak + np.ceil((self.problem.in_flight - 1) * self.resident))

    @cached_property
    def kinds(self) -> list[Choices]:
        """The options of each kind that are worth looking at."""
        kinds = [choices.unbeaten for choices in self._distinct]
        if prod(map(len, kinds)) > MOST_COMBINATIONS:
            kinds = [_fewer(kind, self.problem.in_flight) for kind in kinds]
        while prod(map(len, kinds)) > MOST_COMBINATIONS:
            most = max(range(len(kinds)), key=lambda number: len(kinds[number]))
            kinds[most] = _every_second(kinds[most])
        return kinds

    @cached_property
    def _distinct(self) -> list[Choices]:
        """The kinds of halves, told apart by identity: options of kinds that are alike have windows in other places."""
        return list({id(choices): choices for choices in self.problem.halves}.values())

    @cached_property
    def _kind_of_half(self) -> list[int]:
        numbers = {id(choices): number for number, choices in enumerate(self._distinct)}
        return [numbers[id(choices)] for choices in self.problem.halves]

    @property
    def _size(self) -> int:
        return prod(map(len, self.kinds))

    @cached_property
    def _picked(self) -> list[Numbers]:
        """For each kind, the position of the option that every combination has."""
        return [numbers.ravel() for numbers in np.indices([len(kind) for kind in self.kinds])]

    @cached_property
    def _halves(self) -> list[Columns]:
        """In forward order."""
        columns = [kind.columns.at(picked) for kind, picked in zip(self.kinds, self._picked, strict=True)]
        return [columns[kind] for kind in self._kind_of_half]


def _of_two_sorts(alike: Combinations, fitting: Numbers, faster: Numbers) -> Iterator[Solved]:
    """[2]"""
    for lean in fitting[:MOST_OF_A_SORT]:
        above = alike.answer(int(lean))
        for fast in faster[:MOST_OF_A_SORT]:
            mixed = _most_below(alike.problem, alike.answer(int(fast)), above)
            if mixed is not None:
                yield mixed


def _at_one_price(problem: StageProblem, budget_bytes: int) -> Iterator[Solved]:
    """[3]"""
    before: Solved | None = None
    for answer in at_rising_prices(problem):
        if answer.peak_bytes <= budget_bytes:
            yield answer
            if before is not None and (mixed := _most_below(problem, before, answer)) is not None:
                yield mixed
            return
        before = answer


def _most_below(problem: StageProblem, below: Solved, above: Solved) -> Solved | None:
    """As many layers as fit from `below`, the others from `above`; None where not one does."""
    fits, too_many = 0, problem.layers
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if _with(below, above, count).peak_bytes <= (problem.budget_bytes or 0):
            fits = count
        else:
            too_many = count
    return _with(below, above, fits) if fits else None


def _with(below: Solved, above: Solved, count: int) -> Solved:
    return replace(above, layers=(*below.layers[:count], *above.layers[count:]))


def _fewer(choices: Choices, in_flight: float) -> Choices:
    """Those that no other one beats in seconds and in bytes: what a half holds while backward is elsewhere, and as if it were the
    one with the peak."""
    columns = choices.columns
    peak = (in_flight - 1) * columns.resident + columns.whole + columns.early + columns.ahead + columns.ahead2
    return Choices(choices[number] for number in unbeaten((columns.longer_s, columns.held, peak)))


def _every_second(choices: Choices) -> Choices:
    """Half of them, from the one that holds least to the fastest of those that keep most, both of these included."""
    ordered = sorted(choices, key=lambda option: (option.memory.resident, -option.longer_s))
    return Choices((*compress(ordered[:-1], cycle((True, False))), ordered[-1]))
