"""Prices answers of the heuristic's form, thousands of them at once.

    layers of one stage     1 ... n-k-1     n-k ... n-1          n
    choice                      X               Y           attention as the layer below, last MLP half Z

The attention half of layer n is like the one below as far as there are windows before it (`StageProblem.last_attention`). Of
layers that are alike, the first that backward reaches holds the most. So with u = n-k-1 layers of X the peak is that of two
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
from megatron_lynx.solver.problem import Choices, Columns, Floats, Numbers, StageProblem, unbeaten
from megatron_lynx.units import SECOND_DIGITS


def _moments(attention: Columns, mlp: Columns) -> tuple[Floats, ...]:
    """What a layer's backward needs when each half begins and ends, beside what is held of the layers below."""
    own = attention.held
    return own + mlp.whole + attention.ahead2, own + mlp.tail + attention.ahead, attention.whole, attention.tail


def _ahead(attention: Columns, mlp: Columns) -> tuple[Floats, ...]:
    """What is there of a layer at these moments of the one above."""
    return mlp.ahead4, mlp.ahead3, mlp.ahead2 + attention.ahead4, mlp.ahead + attention.ahead3


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
        attention = self.problem.at_top(self._layer(above).attention)
        end = LayerChoice(attention, self.problem.last_mlp.unbeaten[last])
        lower = (self._layer(below),) * (self.below_last - count) + (self._layer(above),) * count
        return Solved((*lower, end), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)

    def longer_s(self, below: Numbers, above: Numbers, last: Numbers, count: Floats) -> Floats:
        ends_s = self.first.longer_s[above] + self.last.longer_s[last]
        seconds = (self.below_last - count) * self.layer_s[below] + count * self.layer_s[above] + ends_s
        return np.round(seconds, SECOND_DIGITS)

    def resident_bytes(self, below: Numbers, above: Numbers, last: Numbers, count: Floats) -> Floats:
        ends = self.attention.resident[above] + self.last.resident[last]
        return ends + (self.below_last - count) * self.layer_resident[below] + count * self.layer_resident[above]

    def peak_bytes(self, below: Numbers, above: Numbers, last: Numbers, count: Floats) -> Floats:
        held_below = (self.below_last - count) * self.layer_held[below]
        top = self.top(above, last, count) + count * self.layer_held[above] + held_below
        middle = np.where(count < self.below_last, self.middle(below, above, self.below_last - count) + held_below, 0)
        others = self._others * self.resident_bytes(below, above, last, count)
        return np.ceil(others) + np.maximum(top, middle)

    def top(self, above: Numbers, last: Numbers, count: Floats | int = 2) -> Floats:
        """Without a count: as if there were two layers of Y, which may be more than one needs."""
        attention, end = self.first.at(above), self.last.at(last)
        moments = _moments(attention, end)
        before = end.held + attention.held + self.problem.loss_bytes
        highest = np.maximum.reduce(np.broadcast_arrays(before, *moments))
        for number in self._overlapping if self.below_last else ():
            highest = np.maximum(highest, moments[number] + self._ahead[number][above])
        return np.maximum(highest, np.where(np.asarray(count) > 1, self._chained[above], self._alone[above]))

    def middle(self, below: Numbers, above: Numbers, count_below: Floats) -> Floats:
        lower = np.where(count_below > 1, self._chained[below], self._alone[below])
        highest = np.maximum(self._highest[above], lower)
        for number in self._overlapping:
            highest = np.maximum(highest, self._moments[number][above] + self._ahead[number][below])
        return highest

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
    def first(self) -> Columns:
        """The same of the half with which the stage's last layer replaces it."""
        if self.problem.last_attention is None:
            return self.attention
        options = Choices(self.problem.at_top(option) for option in self.problem.attention.unbeaten)
        return options.columns.at(np.repeat(np.arange(len(options)), len(self.problem.mlp.unbeaten)))

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
        attention, mlp = self.attention, self.mlp
        ahead = mlp.ahead, mlp.ahead2, mlp.ahead3, mlp.ahead4, attention.ahead3, attention.ahead4
        costs = self.layer_s, self.layer_resident, self.layer_held, self._chained, self._alone, *ahead
        return unbeaten([cost for cost in costs if cost.any()] or costs[:1])

    @cached_property
    def layer_s(self) -> Floats:
        return self.attention.longer_s + self.mlp.longer_s

    @cached_property
    def layer_resident(self) -> Floats:
        return self.attention.resident + self.mlp.resident

    @cached_property
    def layer_held(self) -> Floats:
        return self.attention.held + self.mlp.held

    @cached_property
    def _moments(self) -> tuple[Floats, ...]:
        return _moments(self.attention, self.mlp)

    @cached_property
    def _ahead(self) -> tuple[Floats, ...]:
        return _ahead(self.attention, self.mlp)

    @cached_property
    def _overlapping(self) -> tuple[int, ...]:
        """The moments at which anything is there of the layer below."""
        return tuple(number for number, size in enumerate(self._ahead) if size.any())

    @cached_property
    def _highest(self) -> Floats:
        """What a layer's backward needs at its highest moment, whatever follows."""
        return np.asarray(np.maximum.reduce(self._moments))

    @cached_property
    def _alone(self) -> Floats:
        """What the backward of the last of some layers needs on top of what is held before it begins."""
        return self._highest - self.layer_held

    @cached_property
    def _chained(self) -> Floats:
        """The same of one that another layer of its kind follows."""
        chained = (self._moments[number] + self._ahead[number] for number in self._overlapping)
        return np.asarray(np.maximum.reduce([self._highest, *chained])) - self.layer_held

    def _layer(self, number: int) -> LayerChoice:
        attention, mlp = divmod(number, len(self.problem.mlp.unbeaten))
        return LayerChoice(self.problem.attention.unbeaten[attention], self.problem.mlp.unbeaten[mlp])
