"""In which waits of a layer the weight gradients of its own linears pass most of their time, by trying every way.

    a layer's waits, in order      bwd.mlp.0   bwd.mlp.2   bwd.attention.0   bwd.attention.2   fwd.attention.0 ...
    replays take                   ▓▓▓▓▓▓▓▓    ▓▓          ▓▓▓▓▓▓▓           ▓▓
    weight gradients may take                  ░░░░░░              ░         ░░░░░░            ░░░░░░░░░░░

    a layer takes    every wait, and what does not fit into it   +   every weight gradient that is not put off

[1] the column-parallel linear's hides the wait behind it where it is not put off
[2] layers below are taken to be filled like this one, so what runs in a window of the layer below counts as in one of its own
[3] what gains less than `WORTH` of its seconds stays where it is; of equals that which waits shortest

In which waits the weight gradients of a layer with many linears pass their time, by trying every way of two at a time.

    linears    [fc2  fc1] proj kv_up q_up ...      every way of the first two, the others put nowhere yet
               fc2 [fc1  proj] kv_up q_up ...      every way of the next two, beside what is chosen
               ...                                 from the first pair again, until nothing changes any more

Latent attention has five linears beside the two of an MLP, and each some twenty places: every way is too many. What is found need
not be the best of all; it is never worse than putting nothing off.
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


MOST_AT_ONCE = 4
"""Linears of which every way is tried, as of a layer without latent attention."""

ROUNDS = 4
"""How often all pairs have their turn at most."""


def ways_of(lengths_s: Sequence[float], linears: Sequence[Linear], interference: float) -> Ways | InTurns:
    """All ways to fill a layer's waits, or, of many linears, the good ones."""
    return (Ways if len(linears) <= MOST_AT_ONCE else InTurns)(lengths_s, linears, interference)


class InTurns:
    """Good ways to put the weight gradients of many linears into a layer's waits, whatever replays take of these."""

    def __init__(self, lengths_s: Sequence[float], linears: Sequence[Linear], interference: float) -> None:
        self._lengths_s = lengths_s
        self._linears = linears
        self._interference = interference

    def best(self, filled_s: Sequence[float]) -> list[Packed]:
        """The best one found that leaves forwards alone, and the best one found at all."""
        within_backward = self._found([_without_forwards(linear) for linear in self._linears], filled_s)
        anywhere = self._found(self._linears, filled_s)
        return [within_backward] if anywhere == within_backward else [within_backward, anywhere]

    def _found(self, linears: Sequence[Linear], filled_s: Sequence[float]) -> Packed:
        chosen: dict[str, str | None] = dict.fromkeys(linear.name for linear in linears)
        seconds = 0.0
        for _ in range(ROUNDS):
            before = dict(chosen)
            for pair in pairwise(linears):
                others = {linear: chosen[linear.name] for linear in linears if linear not in pair}
                lengths_s, taken_s = self._beside(others, filled_s)
                packed = Ways(lengths_s, pair, self._interference).best_of_all(taken_s)
                seconds = packed.seconds + sum(linear.seconds for linear, name in others.items() if name is None)
                chosen |= {linear.name: packed.waits.get(linear.name) for linear in pair}
            if chosen == before:
                break
        return Packed(seconds, {linear: name for linear, name in chosen.items() if name is not None})

    def _beside(self, others: dict[Linear, str | None], filled_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """How long waits are, and what is taken of them, with these linears' weight gradients where they are."""
        lengths_s, taken_s = list(self._lengths_s), list(filled_s)
        for linear, name in others.items():
            if name is not None:
                taken_s[next(put.wait for put in linear.places if put.name == name)] += linear.seconds
            elif linear.beside is not None:
                lengths_s[linear.beside] = max(0.0, lengths_s[linear.beside] - linear.seconds)
        return lengths_s, taken_s


def _without_forwards(linear: Linear) -> Linear:
    return replace(linear, places=tuple(put for put in linear.places if not is_forward(put.name)))
