"""Cuts weight gradients that are longer than a layer's waits, so that each piece may have a wait of its own.

    linear_fc1, 1.2 ms    waits of 0.3 ms    ──cut──> four units      packed like four linears
                                             ──placed──> [bwd.mlp.2, bwd.attention.0, bwd.attention.2, bwd.mlp.0-1]

A unit that gets no wait runs in the one which its linear would hide, or else in the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product
from math import ceil, gcd
from typing import NamedTuple

from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.cost.prices import WeightGradient
from megatron_lynx.planner.packing import LONG, Linear, Packed, Put, Wait

MOST_PIECES = 4
"""More of them gain nothing (`design/value.md`: four fill every wait), and are GEMMs of less efficiency."""


class Placed(NamedTuple):
    """As `Packed`, with a wait for each piece."""

    seconds: float
    waits: dict[str, tuple[str, ...]]


def cut(
    linears: Sequence[Linear], cost_of: Callable[[str], WeightGradient], waits: Sequence[Wait], longest_s: float
) -> Iterator[tuple[Linear, ...]]:
    """Yield the linears whole, then with those in 2 or in most pieces that are longer than the longest wait.

    `waits`: of the layer. Pieces may run in all waits of its forward, of which whole linears need only as many as they are.
    """
    forwards = tuple(Put(index, wait.name, LONG) for index, wait in enumerate(waits) if is_forward(wait.name))
    choices = []
    for linear in linears:
        cost = cost_of(linear.name)
        most = min(MOST_PIECES, cost.most_pieces, ceil(linear.seconds / longest_s)) if longest_s else 1
        backward = tuple(put for put in linear.places if not is_forward(put.name))
        unit = replace(linear, places=backward + forwards)
        choices.append([(linear,), *(_units(unit, cost, pieces) for pieces in sorted({2, most}) if most > 1)])
    for chosen in product(*choices):
        yield tuple(unit for units in chosen for unit in units)


def _units(linear: Linear, cost: WeightGradient, pieces: int) -> tuple[Linear, ...]:
    numbered = enumerate(cost.cut(pieces))
    return tuple(replace(linear, name=f"{linear.name} {piece}", seconds=of_piece.seconds) for piece, of_piece in numbered)


def may_gain(found: Sequence[Sequence[Placed]], units: Sequence[Linear], waits: Sequence[Wait], interference: float) -> bool:
    """Whether these units may be faster than the ways that were found, without forwards or with them."""
    firsts, every = [first for first, *_ in found], list(chain.from_iterable(found))
    return any(
        _least_s(units, waits, interference, forwards=forwards) < min(way.seconds for way in ways)
        for forwards, ways in ((False, firsts), (True, every))
    )


def _least_s(units: Sequence[Linear], waits: Sequence[Wait], interference: float, *, forwards: bool) -> float:
    """Seconds of a layer if each wait could hold any part of any weight gradient. One that hides a wait is not slowed in it."""
    hidden = {unit.beside for unit in units}
    room_s = least_s = 0.0
    for number, wait in enumerate(waits):
        free_s = wait.seconds / (1.0 if number in hidden else interference) - wait.filled_s
        least_s += wait.seconds + max(0.0, -free_s)
        room_s += max(0.0, free_s) if forwards or not is_forward(wait.name) else 0.0
    return least_s + max(0.0, sum(unit.seconds for unit in units) - room_s)


def best_of(ways: Iterable[Sequence[Placed]]) -> list[Placed]:
    """Return the best way without forwards, and the best one of all if it is another. `ways`: first of each those without."""
    ways = list(ways)
    if len(ways) == 1:
        return list(ways[0])
    within, anywhere = (min(some, key=lambda way: way.seconds) for some in ([first for first, *_ in ways], [*chain(*ways)]))
    return [within] if anywhere == within else [within, anywhere]


def placed(packed: Packed, units: Sequence[Linear], waits: Sequence[Wait]) -> Placed:
    """Return the waits by linear."""
    chosen: dict[str, Counter[str]] = {}
    for unit in units:
        home = waits[unit.beside].name if unit.beside is not None else unit.places[0].name if unit.places else ""
        chosen.setdefault(unit.name.partition(" ")[0], Counter())[packed.waits.get(unit.name, home)] += 1
    delayed = {unit.partition(" ")[0] for unit in packed.waits}
    return Placed(packed.seconds, {linear: _fewest(numbers) for linear, numbers in chosen.items() if linear in delayed})


def _fewest(numbers: Counter[str]) -> tuple[str, ...]:
    """The waits of the fewest equal pieces with these shares."""
    pieces = gcd(*numbers.values())
    return tuple(wait for wait, number in numbers.items() for _ in range(number // pieces))
