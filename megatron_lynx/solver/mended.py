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

from megatron_lynx.solver.answer import Solved, layers_of
from megatron_lynx.solver.problem import Choices, Columns, Floats, Option, StageProblem

WEIGHTS = (1.0, 1.5)
"""What bytes count beside seconds."""

KINDS = ("resident", "held", "whole", "tail", "ahead", "ahead2", "ahead3", "ahead4")

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
        while (change := self._change(backward, weight)) is not None:
            half, option = change
            backward[half] = option
        found = Solved(layers_of(backward[::-1]), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)
        return found if found.peak_bytes <= (self.problem.budget_bytes or 0) else None

    def _change(self, backward: list[Option], weight: float) -> tuple[int, Option] | None:
        """The next half to change, and its option; None where nothing is too much, or no change takes anything away."""
        own = Choices(backward).columns
        bytes_now = _by_kind(own)
        held = np.einsum("hc,hcm->m", bytes_now, self._adds)
        held[0] += self.problem.loss_bytes
        too_much = self._beyond(held)
        if not too_much:
            return None
        held_then = held + (self._bytes - bytes_now[:, None]) @ self._adds
        taken_away = too_much - self._beyond(held_then)
        dearer_s = np.maximum(self._seconds - own.longer_s[:, None], FREE_S)
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(taken_away > 0, dearer_s / taken_away**weight, np.inf)
        half, option = divmod(int(price.argmin()), price.shape[1])
        return (half, self._offered[half][option]) if np.isfinite(price[half, option]) else None

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
        """By half, option and kind."""
        table = np.zeros((*self._seconds.shape, len(KINDS)))
        for half, choices in enumerate(self._offered):
            table[half, : len(choices)] = _by_kind(choices.columns)
        return table

    @cached_property
    def _adds(self) -> Floats:
        """By half, kind and moment: how many bytes one byte of that kind adds to what is held.

        Moments: before backward begins, the beginning of every half's, the end of every half's.
        """
        count = len(self._offered)
        adds = np.zeros((count, len(KINDS), 1 + 2 * count))
        adds[:, KINDS.index("resident")] = self.problem.in_flight - 1
        adds[:, KINDS.index("held"), 0] = 1
        begins, ends = adds[:, :, 1 : 1 + count], adds[:, :, 1 + count :]
        for half in range(count):
            begins[half, KINDS.index("held"), :half] = ends[half, KINDS.index("held"), :half] = 1
            for before, at_beginning, at_end in ((0, "whole", "tail"), (1, "ahead2", "ahead"), (2, "ahead4", "ahead3")):
                if half >= before:
                    begins[half, KINDS.index(at_beginning), half - before] = 1
                    ends[half, KINDS.index(at_end), half - before] = 1
        return adds


def _by_kind(columns: Columns) -> Floats:
    return np.stack([getattr(columns, kind) for kind in KINDS], axis=-1)
