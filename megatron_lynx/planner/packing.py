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
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain, combinations, cycle, permutations
from math import gcd, inf
from typing import NamedTuple

from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.solver.problem import WAIT_S

WORTH = 0.01
"""Part of its seconds that deferring a weight gradient must gain. With 0, Llama 3 70B on two thirds of an H100 loses 0.8 %; with
0.02, Mixtral 8x7B on H800 loses 1.9 %."""


class Put(NamedTuple):
    """One place for a weight gradient: a wait's index, and its name relative to the linear's layer."""

    wait: int
    name: str
    windows: int
    """Number of windows that it waits."""


class Linear(NamedTuple):
    name: str
    beside: Put | None
    """The wait that its weight gradient hides if not deferred. Pieces may run there."""
    places: tuple[Put, ...]
    cuts: tuple[tuple[int, float], ...]
    """Numbers of pieces that are possible, and seconds of one of so many; the whole first."""

    @property
    def seconds(self) -> float:
        return self.cuts[0][1]


class Placed(NamedTuple):
    seconds: float
    """Seconds of the layer's waits and weight gradients together."""
    waits: dict[str, tuple[str, ...]]
    """By deferred linear, the wait of each piece."""


@lru_cache(maxsize=1024)
def ways_of(none: Loads, linears: tuple[Linear, ...]) -> list[Placed]:
    """Return the best assignment found without forwards, each weight gradient of it by itself, then shorter assignments: the best
    of all, and those with forwards for one of the weight gradients that use them there, or for all but one.

    `none`: the layer without weight gradients. None is by itself if one of them hides a wait.
    """

    def best(forwards: Collection[str]) -> Placed:
        """`forwards`: linears whose weight gradients may use waits of forwards."""
        places = [tuple(put for put in one.places if one.name in forwards or not is_forward(put.name)) for one in linears]
        return _best([one._replace(places=may) for one, may in zip(linears, places, strict=True)], none)

    first, most = best(()), best([linear.name for linear in linears])
    hiding = any(linear.name in first.waits for linear in linears if linear.beside is not None)
    alone = [] if hiding else [first._replace(waits={linear: waits}) for linear, waits in first.waits.items()]
    using = [linear for linear, names in most.waits.items() if any(map(is_forward, names))]
    fewer = chain.from_iterable(combinations(using, size) for size in {1, len(using) - 1} if 0 < size < len(using))
    shorter = (way for way in (most, *map(best, fewer)) if way.seconds < first.seconds)
    return [first, *alone, *shorter]


Chosen = dict[str, tuple[Put, ...]]
"""By linear, the place of each piece; none if it is not deferred."""


class Loads(NamedTuple):
    """What a layer's waits take; recomputation alone, or with weight gradients."""

    lengths_s: Sequence[float]
    """Seconds of each wait, without the part that a weight gradient beside it hides."""
    taken_s: Sequence[float]
    """Work in each wait, without interference."""
    interference: float
    alone_s: float = 0.0
    """Seconds of weight gradients that are not deferred, and the least gain of those that are."""

    def beside(self, linear: Linear, puts: tuple[Put, ...]) -> Loads:
        """Return the loads with one more weight gradient, in pieces at these places; not deferred if there are none."""
        lengths_s, taken_s, alone_s = [*self.lengths_s], [*self.taken_s], linear.seconds
        if puts:
            alone_s = WORTH * linear.seconds + WAIT_S * sum([put.windows for put in puts])
            for put in puts:
                taken_s[put.wait] += dict(linear.cuts)[len(puts)]
        elif linear.beside is not None:
            lengths_s[linear.beside.wait] = max(0.0, lengths_s[linear.beside.wait] - linear.seconds)
        return Loads(lengths_s, taken_s, self.interference, self.alone_s + alone_s)

    @property
    def rooms_s(self) -> list[float]:
        """Seconds of work for which each wait has room; below 0, of work that exceeds it."""
        return [length_s / self.interference - work_s for length_s, work_s in zip(self.lengths_s, self.taken_s, strict=True)]

    @property
    def seconds(self) -> float:
        """Seconds of all waits, with the work that exceeds them, and of weight gradients."""
        return self.alone_s + sum(self.lengths_s) - sum([room_s for room_s in self.rooms_s if room_s < 0])


def _best(linears: Sequence[Linear], none: Loads) -> Placed:
    """Place one weight gradient anew after another, then two together, until nothing gets shorter. `none`: without any."""
    chosen: Chosen = {linear.name: () for linear in linears}
    least_s, alone = inf, [(linear,) for linear in linears]
    for moves in (alone, [*permutations(linears, 2)]):
        turns, in_vain = cycle(moves), 0
        while in_vain < len(moves):
            anew, loads, moved = next(turns), none, dict(chosen)
            for linear in (linear for linear in linears if linear not in anew):
                loads = loads.beside(linear, chosen[linear.name])
            for linear in anew:
                ways = [(loads.beside(linear, puts), puts) for puts in ((), *_piece_by_piece(linear, loads))]
                loads, moved[linear.name] = min(ways, key=lambda way: way[0].seconds)
            in_vain += 1
            if (seconds := loads.seconds) < least_s - WAIT_S / 2:
                least_s, chosen, in_vain = seconds, moved, 0
    return Placed(least_s, {name: _fewest(puts) for name, puts in chosen.items() if puts})


def _piece_by_piece(linear: Linear, loads: Loads) -> Iterator[tuple[Put, ...]]:
    """Yield the best places of one weight gradient, whole and in pieces. Pieces may also run in the wait that it hides anyway."""
    for pieces, piece_s in linear.cuts:
        places = [linear.beside, *linear.places] if linear.beside and pieces > 1 else linear.places
        if places:
            puts, left_s = list[Put](), [max(0.0, room_s) for room_s in loads.rooms_s]
            for _ in range(pieces):
                puts.append(min(places, key=lambda put: max(0.0, piece_s - left_s[put.wait]) + WAIT_S * put.windows))
                left_s[puts[-1].wait] = max(0.0, left_s[puts[-1].wait] - piece_s)
            yield tuple(puts)


def _fewest(puts: Sequence[Put]) -> tuple[str, ...]:
    """Return the waits of the fewest equal pieces with these shares."""
    numbers = Counter(put.name for put in puts)
    pieces = gcd(*numbers.values())
    return tuple(wait for wait, number in numbers.items() for _ in range(number // pieces))
