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
    """Every way to put a layer's weight gradients into its waits, whatever replays take of these."""

    def __init__(self, lengths_s: Sequence[float], linears: Sequence[Linear], interference: float) -> None:
        self._linears = linears
        self._interference = interference
        self._places = [(None, *linear.places) for linear in linears]
        self._chosen = np.array(list(product(*(range(len(places)) for places in self._places))))
        self._length = np.tile(np.array(lengths_s), (len(self._chosen), 1))
        self._fill = np.zeros_like(self._length)
        self._alone, self._cost = np.zeros(len(self._chosen)), np.zeros(len(self._chosen))
        forwards = np.zeros((len(self._chosen), len(linears)), dtype=bool)
        for number, linear in enumerate(linears):
            for at, put in enumerate(self._places[number]):
                rows = self._chosen[:, number] == at
                if put is None:
                    self._stays(rows, linear)
                else:
                    self._fill[rows, put.wait] += linear.seconds
                    self._cost[rows] += WORTH * linear.seconds + 1e-12 * put.windows * linear.bytes / (1 + linear.bytes)
                    forwards[rows, number] = is_forward(put.name)
        subsets = sorted(product((False, True), repeat=len(linears)), key=sum)
        self._subsets = [np.flatnonzero(~(forwards & ~np.array(allowed, dtype=bool)).any(axis=1)) for allowed in subsets]

    def _stays(self, rows: NDArray[np.bool_], linear: Linear) -> None:
        self._alone[rows] += linear.seconds
        if linear.beside is not None:  # [1]
            self._length[rows, linear.beside] = np.maximum(0.0, self._length[rows, linear.beside] - linear.seconds)

    def best(self, filled_s: Sequence[float]) -> list[Packed]:
        """The best ones, one for each set of linears that may use forwards, the first for none; each once."""
        seconds = self._seconds(filled_s)
        cost = seconds + self._cost
        best = dict.fromkeys(int(rows[cost[rows].argmin()]) for rows in self._subsets)
        return [Packed(float(seconds[row]), self._named(self._chosen[row])) for row in best]

    def best_of_all(self, filled_s: Sequence[float]) -> Packed:
        """The best one, whichever linears use forwards."""
        seconds = self._seconds(filled_s)
        row = int((seconds + self._cost).argmin())
        return Packed(float(seconds[row]), self._named(self._chosen[row]))

    def _seconds(self, filled_s: Sequence[float]) -> NDArray[np.float64]:
        """What the layer's waits and its weight gradients take together, each way."""
        beyond = np.maximum(0.0, self._fill + np.array(filled_s) - self._length / self._interference)
        return np.asarray((self._length + beyond).sum(axis=1) + self._alone)

    def _named(self, row: Sequence[int]) -> dict[str, str]:
        puts = ((linear.name, self._places[number][row[number]]) for number, linear in enumerate(self._linears))
        return {name: put.name for name, put in puts if put is not None}
