"""Prices answers of the heuristic's form, thousands of them at once.

    layers of one stage     1 ... n-k-1     n-k ... n-1          n
    choice                      X               Y           attention as the layer below, last MLP half Z

Of layers that are alike, the first that backward reaches holds the most. So with u = n-k-1 layers of X the peak is that of two
straight lines in k, whatever the number of layers:

    (in flight - 1) x resident  +  max(top + k held(Y) + u held(X),  middle + u held(X))
    top       what the loss, Z, the attention half below it, or the first layer of Y needs on top of what is held behind them
    middle    the same of the last half of Y while the first one of X is regenerated, and of the first layer of X

X, Y and Z are given as numbers, or as arrays of numbers: of layers (every attention half with every MLP half), and of last MLP
halves. Where k is n-1 there is no X.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.solver.answer import LayerChoice, Solved
from megatron_lynx.solver.problem import Columns, Floats, Numbers, StageProblem, unbeaten
from megatron_lynx.units import SECOND_DIGITS


@dataclass(frozen=True)
class Form:
    """All answers of this form to one problem."""

    problem: StageProblem

    @property
    def below_last(self) -> int:
        return self.problem.layers - 1

    @property
    def layers(self) -> int:
        """How many kinds of layers there are."""
        return len(self.problem.attention.unbeaten) * len(self.problem.mlp.unbeaten)

    @property
    def lasts(self) -> int:
        """How many kinds of last MLP halves there are."""
        return len(self.problem.last_mlp.unbeaten)

    def answer(self, below: int, above: int, last: int, count: int) -> Solved:
        """One of them, layer by layer, with `count` layers of `above` (k)."""
        end = LayerChoice(self._layer(above).attention, self.problem.last_mlp.unbeaten[last])
        lower = (self._layer(below),) * (self.below_last - count) + (self._layer(above),) * count
        return Solved((*lower, end), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)

    def exposed_s(self, below: Numbers, above: Numbers, last: Numbers, count: Floats) -> Floats:
        ends_s = self.attention.exposed_s[above] + self.last.exposed_s[last]
        seconds = (self.below_last - count) * self.layer_s[below] + count * self.layer_s[above] + ends_s
        return np.round(seconds, SECOND_DIGITS)

    def resident_bytes(self, below: Numbers, above: Numbers, last: Numbers, count: Floats) -> Floats:
        ends = self.attention.resident[above] + self.last.resident[last]
        return ends + (self.below_last - count) * self.layer_resident[below] + count * self.layer_resident[above]

    def peak_bytes(self, below: Numbers, above: Numbers, last: Numbers, count: Floats) -> Floats:
        held_below = (self.below_last - count) * self.layer_held[below]
        top = self.top(above, last) + count * self.layer_held[above] + held_below
        middle = np.where(count < self.below_last, self.middle(below, above, self.below_last - count) + held_below, 0)
        others = self._others * self.resident_bytes(below, above, last, count)
        return np.ceil(others) + np.maximum(top, middle)

    def top(self, above: Numbers, last: Numbers) -> Floats:
        end, behind = self.last, self.attention.held[above]
        first = np.maximum(end.whole[last] + behind, end.tail[last] + behind + self.attention.ahead[above])
        before = end.held[last] + behind + self.problem.loss_bytes
        return np.asarray(np.maximum(np.maximum(before, first), self._below_end[above]))

    def middle(self, below: Numbers, above: Numbers, count_below: Floats) -> Floats:
        following = self.mlp.ahead[below]
        single = np.maximum(self.attention.tail[above] + following, self._hump[below])
        several = self.attention.tail[below] + following - self.layer_held[below]
        return np.maximum(single, np.where(count_below > 1, several, single))

    def count(self, below: Numbers, above: Numbers, last: Numbers, budget_bytes: float) -> Floats:
        """The best k for which both lines stay within the budget, with two of `below` left; 0 if there is none."""
        end = self._others * self.last.resident[last]
        ends = end + self.top(above, last), end + self.middle(below, above, np.array(2.0))
        return self._count(below, above, ends, budget_bytes, self.below_last - 2)

    def count_at_best(self, below: Numbers, above: Numbers, budget_bytes: float) -> Floats:
        """No better k than this fits, whatever the last MLP half is, with one of `below` left; 0 if there is none."""
        ends = self._least_top[above], (self._others * self.last.resident).min() + self.middle(below, above, np.array(1.0))
        return self._count(below, above, ends, budget_bytes, self.below_last - 1)

    def _count(self, below: Numbers, above: Numbers, ends: tuple[Floats, Floats], budget_bytes: float, limit: int) -> Floats:
        """The most layers of `above` where they are faster, else the fewest. `ends`: what of both lines depends on Z."""
        held = self._others * self.layer_resident + self.layer_held
        none = self.below_last * held[below] + self._others * self.attention.resident[above]
        step = self._others * self.layer_resident[above] - held[below]
        least, most = np.ones_like(none), np.full_like(none, limit)
        for end, slope in zip(ends, (step + self.layer_held[above], step), strict=True):
            room = budget_bytes - (none + end)
            with np.errstate(divide="ignore", invalid="ignore"):
                crossing = room / slope
            most = np.where(slope > 0, np.minimum(most, np.floor(crossing)), most)
            least = np.where(slope < 0, np.maximum(least, np.ceil(crossing)), least)
            most = np.where((slope == 0) & (room < 0), 0, most)
        return np.where(most < least, 0, np.where(self.layer_s[above] <= self.layer_s[below], most, least))

    @property
    def _others(self) -> float:
        """Micro-batches in flight beside the one whose backward runs."""
        return self.problem.in_flight - 1

    @cached_property
    def _least_top(self) -> Floats:
        """For every layer the top line's part with the last MLP half for which that is least."""
        layer, last = np.arange(self.layers)[:, None], np.arange(self.lasts)[None, :]
        tops: Floats = self._others * self.last.resident[last] + self.top(layer, last)
        return np.asarray(tops.min(axis=1))

    @cached_property
    def attention(self) -> Columns:
        """Costs of the attention half of every kind of layer."""
        numbers = np.repeat(np.arange(len(self.problem.attention.unbeaten)), len(self.problem.mlp.unbeaten))
        return self.problem.attention.unbeaten.columns.at(numbers)

    @cached_property
    def mlp(self) -> Columns:
        numbers = np.tile(np.arange(len(self.problem.mlp.unbeaten)), len(self.problem.attention.unbeaten))
        return self.problem.mlp.unbeaten.columns.at(numbers)

    @property
    def last(self) -> Columns:
        return self.problem.last_mlp.unbeaten.columns

    @cached_property
    def lower(self) -> NDArray[np.intp]:
        """Numbers of the layers that may be worth having below others: those that no other one beats there."""
        tail, ahead = self.attention.tail, self.mlp.ahead
        return unbeaten((self.layer_s, self.layer_resident, self.layer_held, self._hump, tail, ahead))

    @cached_property
    def layer_s(self) -> Floats:
        return self.attention.exposed_s + self.mlp.exposed_s

    @cached_property
    def layer_resident(self) -> Floats:
        return self.attention.resident + self.mlp.resident

    @cached_property
    def layer_held(self) -> Floats:
        return self.attention.held + self.mlp.held

    @cached_property
    def _hump(self) -> Floats:
        """What a layer's backward needs on top of what is held before it begins."""
        attention, mlp = self.attention, self.mlp
        first = attention.held + np.maximum(mlp.whole, mlp.tail + attention.ahead)
        return np.maximum(first, np.maximum(attention.whole, attention.tail)) - self.layer_held

    @cached_property
    def _below_end(self) -> Floats:
        """What the attention half below the last MLP half needs, and the layers that follow it."""
        attention = self.attention
        alone = np.maximum(attention.whole, attention.tail)
        return np.maximum(np.maximum(alone, attention.tail + self.mlp.ahead), self._hump) if self.below_last else alone

    def _layer(self, number: int) -> LayerChoice:
        attention, mlp = divmod(number, len(self.problem.mlp.unbeaten))
        return LayerChoice(self.problem.attention.unbeaten[attention], self.problem.mlp.unbeaten[mlp])
