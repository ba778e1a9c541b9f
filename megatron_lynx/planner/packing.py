"""Chooses the waits of a layer in which its weight gradients run, whole or in pieces.

    a layer's waits, in order      bwd.mlp.0   bwd.mlp.2   bwd.attention.0   bwd.attention.2   fwd.attention.0 ...
    recomputation takes            ▓▓▓▓▓▓▓▓    ▓▓          ▓▓▓▓▓▓▓           ▓▓
    weight gradients may take                  ░░░░░░              ░         ░░░░░░            ░░░░░░░░░░░

    seconds of a layer  =  its waits, with the work that exceeds them   +   weight gradients that are not deferred

If not deferred, the column-parallel linear's weight gradient hides the next wait. Lower layers are assumed to be filled like this
one, so a window of the layer below counts as one of this layer's. A weight gradient is deferred only if it gains `WORTH` of its
seconds; of equals, the shortest wait is taken.

Work adds to a wait what exceeds it, which is convex. So equal pieces of one weight gradient, given the others, are placed best
one by one, each where it adds least. Weight gradients are placed anew, one or two at a time, until nothing gets shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain, combinations, cycle, permutations
from math import gcd, inf
from typing import NamedTuple

from megatron_lynx.anatomy.address import is_forward

WORTH = 0.01
"""Part of its seconds that deferring a weight gradient must gain. With 0, Llama 3 70B on two thirds of an H100 loses 0.8 %; with
0.02, Mixtral 8x7B on H800 loses 1.9 %."""

WINDOW_S = 1e-12
"""Seconds that count for a window that a weight gradient waits: a tie-break."""


class Wait(NamedTuple):
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


class Linear(NamedTuple):
    name: str
    beside: int | None
    """Index of the wait that its weight gradient hides if not deferred. Pieces may run there."""
    places: tuple[Put, ...]
    cuts: tuple[tuple[float, ...], ...]
    """Seconds of its pieces for each number of them that is possible, the whole first."""

    @property
    def seconds(self) -> float:
        return self.cuts[0][0]

    def cut(self, pieces: int) -> tuple[float, ...]:
        return self.cuts[0] if pieces == 1 else next(pieces_s for pieces_s in self.cuts if len(pieces_s) == pieces)


class Placed(NamedTuple):
    seconds: float
    """Seconds of the layer's waits and weight gradients together."""
    waits: dict[str, tuple[str, ...]]
    """By deferred linear, the wait of each piece."""


@lru_cache(maxsize=1024)
def ways_of(waits: tuple[Wait, ...], linears: tuple[Linear, ...], interference: float, *, pieces: bool) -> list[Placed]:
    """Return the best assignment found without forwards, then shorter ones: the best of all, and those with forwards for one of
    the weight gradients that use them there, or for all but one.

    `pieces`: whether weight gradients may be cut.
    """
    layer = partial(_Layer, waits, linears, interference, pieces)
    first, most = layer(()).best(), layer([linear.name for linear in linears]).best()
    using = [linear for linear, names in most.waits.items() if any(map(is_forward, names))]
    sizes = sorted({1, len(using) - 1}) if len(using) > 1 else ()
    fewer = chain.from_iterable(combinations(using, size) for size in sizes)
    others = [most, *(layer(forwards).best() for forwards in fewer)]
    return [first, *(way for way in others if way.seconds < first.seconds)]


Chosen = dict[str, tuple[Put, ...]]
"""By linear, the place of each piece; none if it is not deferred."""


@dataclass(frozen=True)
class _Layer:
    """`pieces`: whether weight gradients may be cut. `forwards`: linears whose weight gradients may use waits of forwards."""

    waits: Sequence[Wait]
    linears: Sequence[Linear]
    interference: float
    pieces: bool
    forwards: Collection[str]

    def best(self) -> Placed:
        """Place one weight gradient anew after another, then two together, until nothing gets shorter."""
        chosen: Chosen = {linear.name: () for linear in self.linears}
        least_s, alone = inf, [(linear,) for linear in self.linears]
        for moves in (alone, [*permutations(self.linears, 2)]):
            turns, in_vain = cycle(moves), 0
            while in_vain < len(moves):
                seconds, moved = self._moved(next(turns), chosen)
                in_vain += 1
                if seconds < least_s - WINDOW_S:
                    least_s, chosen, in_vain = seconds, moved, 0
        waits = {linear.name: _fewest(chosen[linear.name]) for linear in self.linears if chosen[linear.name]}
        return Placed(least_s, waits)

    def _moved(self, linears: Sequence[Linear], chosen: Chosen) -> tuple[float, Chosen]:
        """Return the layer's seconds, and the places with these weight gradients placed anew, one after another."""
        names = {linear.name for linear in linears}
        moved = {name: puts for name, puts in chosen.items() if name not in names}
        for linear in linears:
            seconds, moved[linear.name] = self._cheapest(linear, moved)
        return seconds, moved

    def _cheapest(self, linear: Linear, others: Chosen) -> tuple[float, tuple[Put, ...]]:
        """Return the layer's seconds and the best places of one weight gradient; none if it is not deferred."""
        lengths_s, taken_s, alone_s = self._loads(others)
        staying_s = alone_s + linear.seconds + self._waits_s(self._hiding(linear, lengths_s), taken_s)
        cuts = linear.cuts if self.pieces else linear.cuts[:1]
        ways = [self._piece_by_piece(linear, pieces_s, lengths_s, taken_s) for pieces_s in cuts]
        return min([(staying_s, ()), *((alone_s + seconds, puts) for seconds, puts in ways if puts)], key=lambda way: way[0])

    def _piece_by_piece(
        self, linear: Linear, pieces_s: Sequence[float], lengths_s: Sequence[float], taken_s: Sequence[float]
    ) -> tuple[float, tuple[Put, ...]]:
        puts, places = list[Put](), self._places[linear.name, len(pieces_s) > 1]
        taken_s, late_s = list(taken_s), WORTH * linear.seconds
        left_s = [max(0.0, room_s) for room_s in self._rooms_s(lengths_s, taken_s)]
        for piece_s in pieces_s if places else ():
            put = min(places, key=lambda put: max(0.0, piece_s - left_s[put.wait]) + WINDOW_S * put.windows)
            puts.append(put)
            taken_s[put.wait] += piece_s
            left_s[put.wait] = max(0.0, left_s[put.wait] - piece_s)
            late_s += WINDOW_S * put.windows
        return late_s + self._waits_s(lengths_s, taken_s), tuple(puts)

    @cached_property
    def _places(self) -> Mapping[tuple[str, bool], list[Put]]:
        """By linear and whether it is cut: its places. Pieces may also run in the wait that they hide anyway."""
        places = dict[tuple[str, bool], list[Put]]()
        for linear in self.linears:
            may = linear.places if linear.name in self.forwards else [put for put in linear.places if not is_forward(put.name)]
            beside = [] if linear.beside is None else [Put(linear.beside, self.waits[linear.beside].name, 0)]
            places |= {(linear.name, False): [*may], (linear.name, True): [*beside, *may]}
        return places

    def _loads(self, chosen: Chosen) -> tuple[list[float], list[float], float]:
        """Return the length of each wait, the seconds taken in it, and those of weight gradients that are not deferred."""
        lengths_s, taken_s, alone_s = [wait.seconds for wait in self.waits], [wait.filled_s for wait in self.waits], 0.0
        for linear in self.linears:
            puts = chosen.get(linear.name)
            if puts:
                alone_s += WORTH * linear.seconds + WINDOW_S * sum(put.windows for put in puts)
                for put, seconds in zip(puts, linear.cut(len(puts)), strict=True):
                    taken_s[put.wait] += seconds
            elif puts is not None:
                alone_s += linear.seconds
                lengths_s = self._hiding(linear, lengths_s)
        return lengths_s, taken_s, alone_s

    def _hiding(self, linear: Linear, lengths_s: list[float]) -> list[float]:
        """Return the lengths of waits where this linear's weight gradient, which is not deferred, hides its own."""
        lengths_s = list(lengths_s)
        if linear.beside is not None:
            lengths_s[linear.beside] = max(0.0, lengths_s[linear.beside] - linear.seconds)
        return lengths_s

    def _waits_s(self, lengths_s: Sequence[float], taken_s: Sequence[float]) -> float:
        """Seconds of all waits, with the work that exceeds them."""
        return sum(lengths_s) - sum(room_s for room_s in self._rooms_s(lengths_s, taken_s) if room_s < 0)

    def _rooms_s(self, lengths_s: Sequence[float], taken_s: Sequence[float]) -> list[float]:
        """Seconds of work for which each wait has room; below 0, of work that exceeds it."""
        return [length_s / self.interference - work_s for length_s, work_s in zip(lengths_s, taken_s, strict=True)]


def _fewest(puts: Sequence[Put]) -> tuple[str, ...]:
    """Return the waits of the fewest equal pieces with these shares."""
    numbers = Counter(put.name for put in puts)
    pieces = gcd(*numbers.values())
    return tuple(wait for wait, number in numbers.items() for _ in range(number // pieces))
