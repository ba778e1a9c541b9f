"""Mends an answer that holds too much: changes one half after the other until the stage keeps its budget.

A programme in which few halves are chosen one by one finds what the stage's halves should be, and leaves out when those need most
that it only counts. Its answer is nearly right, and to choose every half one by one takes HiGHS fifty times as long.

    moments of a backward     ▂▄██▇▆▅▃▂▁     what is held at each [A] [B] (`cost.memory`): a sum over halves, each with a weight
    the budget                ──────────     beyond it: all that is too much at any moment, added up
    a change of one half      ▂▄▆▆▇▆▅▃▂▁     costs seconds, and takes some of that away; the cheapest is made, then the next one

What is cheapest depends on what bytes count beside seconds (`weight`): with 1 a byte is worth the same wherever it is taken, with
more those changes come first that take much away at once. No weight is always the best, so several are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_lynx.cost.memory import held_by_one
from megatron_lynx.solver.answer import Solved, layers_of
from megatron_lynx.solver.problem import Choices, Columns, Floats, StageProblem

WEIGHTS = (1.0, 1.5)
"""What bytes count beside seconds."""

FREE_S = 1e-12
"""A change that takes no longer than this, or less time than before, is taken to cost so much."""


def mended(problem: StageProblem, answer: Solved) -> Solved | None:
    """The fastest of those answers that keep the budget into which this one can be changed; None where there is none."""
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
        return [choices.unbeaten for choices in self.problem.halves[::-1]]

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
