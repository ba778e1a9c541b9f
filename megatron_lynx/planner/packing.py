"""Chooses the waits of a layer in which its weight gradients run, by trying every assignment.

    a layer's waits, in order      bwd.mlp.0   bwd.mlp.2   bwd.attention.0   bwd.attention.2   fwd.attention.0 ...
    recomputation takes            ▓▓▓▓▓▓▓▓    ▓▓          ▓▓▓▓▓▓▓           ▓▓
    weight gradients may take                  ░░░░░░              ░         ░░░░░░            ░░░░░░░░░░░

    seconds of a layer  =  its waits, with the work that exceeds them   +   weight gradients that are not deferred

If not deferred, the column-parallel linear's weight gradient hides the next wait. Lower layers are assumed to be filled like this
one, so a window of the layer below counts as one of this layer's. A weight gradient is deferred only if it gains `WORTH` of its
seconds; of equals, the shortest wait is taken.

A layer with more than `MOST_AT_ONCE` linears (latent attention has five besides the MLP's two) is searched pair by pair:

    linears    [fc2  fc1] proj kv_up q_up ...      every assignment of the first two, the others not deferred
               fc2 [fc1  proj] kv_up q_up ...      every assignment of the next two, given the others' choices
               ...                                 again from the first pair, until nothing changes

The result need not be the best, but is never worse than deferring nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.anatomy.address import is_forward

WORTH = 0.02
"""Part of its seconds that deferring a weight gradient must gain."""

LONG = 1000
"""Windows that a weight gradient waits for a forward: more than in any backward."""


class Wait(NamedTuple):
    """One window of a layer."""

    name: str
    seconds: float
    """Whole length, without a weight gradient that hides it."""
    filled_s: float
    """Seconds of recomputation in it, without interference."""


class Put(NamedTuple):
    """One place for a weight gradient: a wait's index, and its name relative to the linear's layer."""

    wait: int
    name: str
    windows: int
    """Number of windows that it waits."""


@dataclass(frozen=True)
class Linear:
    name: str
    seconds: float
    bytes: int
    beside: int | None
    """Index of the wait that its weight gradient hides if not deferred."""
    places: tuple[Put, ...]


class Packed(NamedTuple):
    """One assignment of a layer's weight gradients."""

    seconds: float
    """Seconds of the layer's waits and weight gradients together."""
    waits: dict[str, str]
    """By linear, the wait of its deferred weight gradient."""


NOWHERE = Packed(0.0, {})
"""A layer without waits."""


class Ways:
    """All assignments of a layer's weight gradients to its waits.

    A row is an assignment: for each linear the index of its place, 0 if it is not deferred.
    """

    def __init__(self, lengths_s: Sequence[float], linears: Sequence[Linear], interference: float) -> None:
        self._linears = linears
        self._interference = interference
        self._places = [(None, *linear.places) for linear in linears]
        self._chosen = np.indices([len(places) for places in self._places]).reshape(len(linears), -1)
        ways = self._chosen.shape[1]
        self._length = np.tile(np.array(lengths_s), (ways, 1))
        self._fill = np.zeros_like(self._length)
        self._alone, self._cost = np.zeros(ways), np.zeros(ways)
        forwards = np.zeros(ways, dtype=np.intp)
        for number, (linear, chosen) in enumerate(zip(linears, self._chosen, strict=True)):
            put_off = linear.places
            windows = np.array([0.0, *(1e-12 * put.windows * linear.bytes / (1 + linear.bytes) for put in put_off)])
            worth_s = np.array([0.0, *[WORTH * linear.seconds] * len(put_off)])
            fill = np.zeros((1 + len(put_off), len(lengths_s)))
            for at, put in enumerate(put_off, start=1):
                fill[at, put.wait] = linear.seconds
            self._fill += fill[chosen]
            self._cost += (worth_s + windows)[chosen]
            forwards |= np.array([0, *(is_forward(put.name) << number for put in put_off)])[chosen]
            self._stays(chosen == 0, linear)
        self._using = [(used, np.flatnonzero(forwards == used)) for used in np.unique(forwards)]
        """By bit set of linears that use forwards, the rows in which exactly these do."""

    def _stays(self, rows: NDArray[np.bool_], linear: Linear) -> None:
        self._alone[rows] += linear.seconds
        if linear.beside is not None:
            self._length[rows, linear.beside] = np.maximum(0.0, self._length[rows, linear.beside] - linear.seconds)

    def best(self, filled_s: Sequence[float]) -> list[Packed]:
        """Return the best assignment for each set of linears that may use forwards, first the empty set, without duplicates."""
        seconds = self._seconds(filled_s)
        cost = seconds + self._cost
        least = [(used, int(rows[cost[rows].argmin()])) for used, rows in self._using]
        subsets = sorted(product((0, 1), repeat=len(self._linears)), key=sum)
        masks = [sum(bit << number for number, bit in enumerate(subset)) for subset in subsets]
        cheapest_rows = (min((cost[row], row) for used, row in least if not used & ~mask) for mask in masks)
        return [Packed(float(seconds[row]), self._named(row)) for row in dict.fromkeys(row for _, row in cheapest_rows)]

    def best_of_all(self, filled_s: Sequence[float]) -> Packed:
        """Return the best assignment, whichever linears use forwards."""
        seconds = self._seconds(filled_s)
        row = int((seconds + self._cost).argmin())
        return Packed(float(seconds[row]), self._named(row))

    def _seconds(self, filled_s: Sequence[float]) -> NDArray[np.float64]:
        """Seconds of the layer's waits and weight gradients, by row."""
        beyond = np.maximum(0.0, self._fill + np.array(filled_s) - self._length / self._interference)
        return np.asarray((self._length + beyond).sum(axis=1) + self._alone)

    def _named(self, row: int) -> dict[str, str]:
        choices = zip(self._linears, self._places, self._chosen[:, row], strict=True)
        return {linear.name: put.name for linear, places, at in choices if (put := places[at]) is not None}


MOST_AT_ONCE = 4
"""Most linears for which all assignments are tried; layers without latent attention have no more."""

ROUNDS = 4


def ways_of(lengths_s: Sequence[float], linears: Sequence[Linear], interference: float) -> Ways | InTurns:
    """All assignments, or pair by pair for many linears."""
    return (Ways if len(linears) <= MOST_AT_ONCE else InTurns)(lengths_s, linears, interference)


class InTurns:
    """Good assignments of many linears' weight gradients."""

    def __init__(self, lengths_s: Sequence[float], linears: Sequence[Linear], interference: float) -> None:
        self._lengths_s = lengths_s
        self._linears = linears
        self._interference = interference

    def best(self, filled_s: Sequence[float]) -> list[Packed]:
        """Return the best found without forwards, and the best found at all."""
        within_backward = self._pack([_without_forwards(linear) for linear in self._linears], filled_s)
        anywhere = self._pack(self._linears, filled_s)
        return [within_backward] if anywhere == within_backward else [within_backward, anywhere]

    def _pack(self, linears: Sequence[Linear], filled_s: Sequence[float]) -> Packed:
        chosen: dict[str, str | None] = dict.fromkeys(linear.name for linear in linears)
        seconds, known = 0.0, dict[object, Packed]()
        for _ in range(ROUNDS):
            before = dict(chosen)
            for pair in pairwise(linears):
                choices = {linear: chosen[linear.name] for linear in linears if linear not in pair}
                key = pair[0].name, *choices.values()
                if key not in known:
                    lengths_s, taken_s = self._beside(choices, filled_s)
                    known[key] = Ways(lengths_s, pair, self._interference).best_of_all(taken_s)
                packed = known[key]
                seconds = packed.seconds + sum(linear.seconds for linear, name in choices.items() if name is None)
                chosen |= {linear.name: packed.waits.get(linear.name) for linear in pair}
            if chosen == before:
                break
        return Packed(seconds, {linear: name for linear, name in chosen.items() if name is not None})

    def _beside(self, choices: dict[Linear, str | None], filled_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """Length of each wait, and seconds taken in it, given these linears' choices."""
        lengths_s, taken_s = list(self._lengths_s), list(filled_s)
        for linear, name in choices.items():
            if name is not None:
                taken_s[next(put.wait for put in linear.places if put.name == name)] += linear.seconds
            elif linear.beside is not None:
                lengths_s[linear.beside] = max(0.0, lengths_s[linear.beside] - linear.seconds)
        return lengths_s, taken_s


def _without_forwards(linear: Linear) -> Linear:
    return replace(linear, places=tuple(put for put in linear.places if not is_forward(put.name)))
