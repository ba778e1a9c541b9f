"""In which waits of a layer the weight gradients of its own linears pass most of their time, by trying every way.

    a layer's waits, in order      bwd.mlp.0   bwd.mlp.2   bwd.attention.0   bwd.attention.2   fwd.attention.0 ...
    replays take                   ▓▓▓▓▓▓▓▓    ▓▓          ▓▓▓▓▓▓▓           ▓▓
    weight gradients may take                  ░░░░░░              ░         ░░░░░░            ░░░░░░░░░░░

    a layer takes    every wait, and what does not fit into it   +   every weight gradient that is not put off

[1] the column-parallel linear's hides the wait behind it where it is not put off
[2] layers below are taken to be filled like this one, so what runs in a window of the layer below counts as in one of its own
[3] what gains less than `WORTH` of its seconds stays where it is; of equals that which waits shortest
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.anatomy.address import is_forward

WORTH = 0.02
"""The part of its own seconds that putting a weight gradient off must gain: it is one more thing to run elsewhere."""

LONG = 1000
"""How many windows a weight gradient waits that runs in a forward: more than in any backward."""


class Wait(NamedTuple):
    """One window of a layer."""

    name: str
    seconds: float
    """Its whole length, nothing of it hidden by a weight gradient."""
    filled_s: float
    """Seconds of the replays that run in it, as they take alone."""


class Put(NamedTuple):
    """One place for a weight gradient: a wait, by its number, and how a plan calls it from the linear's layer."""

    wait: int
    name: str
    windows: int
    """How many windows it waits."""


@dataclass(frozen=True)
class Linear:
    """One linear of a layer."""

    name: str
    seconds: float
    bytes: int
    beside: int | None
    """The number of the wait that its weight gradient hides where it is not put off. [1]"""
    places: tuple[Put, ...]


class Packed(NamedTuple):
    """One way to fill a layer's waits."""

    seconds: float
    """What the layer's waits and its weight gradients take together."""
    waits: dict[str, str]
    """By linear that puts its weight gradient off: where it runs."""


NOWHERE = Packed(0.0, {})
"""A layer without waits."""


class Ways:
    """Every way to put a layer's weight gradients into its waits, whatever replays take of these.

    A row is a way: for every linear the number of its place, 0 where its weight gradient is not put off.
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
        """By set of linears that use forwards, each a bit: the ways in which these do, and no others."""

    def _stays(self, rows: NDArray[np.bool_], linear: Linear) -> None:
        self._alone[rows] += linear.seconds
        if linear.beside is not None:  # [1]
            self._length[rows, linear.beside] = np.maximum(0.0, self._length[rows, linear.beside] - linear.seconds)

    def best(self, filled_s: Sequence[float]) -> list[Packed]:
        """The best ones, one for each set of linears that may use forwards, the first for none; each once."""
        seconds = self._seconds(filled_s)
        cost = seconds + self._cost
        least = [(used, int(rows[cost[rows].argmin()])) for used, rows in self._using]
        subsets = sorted(product((0, 1), repeat=len(self._linears)), key=sum)
        masks = [sum(bit << number for number, bit in enumerate(subset)) for subset in subsets]
        found = (min((cost[row], row) for used, row in least if not used & ~mask) for mask in masks)
        return [Packed(float(seconds[row]), self._named(row)) for row in dict.fromkeys(row for _, row in found)]

    def best_of_all(self, filled_s: Sequence[float]) -> Packed:
        """The best one, whichever linears use forwards."""
        seconds = self._seconds(filled_s)
        row = int((seconds + self._cost).argmin())
        return Packed(float(seconds[row]), self._named(row))

    def _seconds(self, filled_s: Sequence[float]) -> NDArray[np.float64]:
        """What the layer's waits and its weight gradients take together, each way."""
        beyond = np.maximum(0.0, self._fill + np.array(filled_s) - self._length / self._interference)
        return np.asarray((self._length + beyond).sum(axis=1) + self._alone)

    def _named(self, row: int) -> dict[str, str]:
        each = zip(self._linears, self._places, self._chosen[:, row], strict=True)
        return {linear.name: put.name for linear, places, at in each if (put := places[at]) is not None}
