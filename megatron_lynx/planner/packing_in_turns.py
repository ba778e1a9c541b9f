"""In which waits the weight gradients of a layer with many linears pass their time, by trying every way of two at a time.

    linears    [fc2  fc1] proj kv_up q_up ...      every way of the first two, the others put nowhere yet
               fc2 [fc1  proj] kv_up q_up ...      every way of the next two, beside what is chosen
               ...                                 from the first pair again, until nothing changes any more

Latent attention has five linears beside the two of an MLP, and each some twenty places: every way is too many. What is found need
not be the best of all; it is never worse than putting nothing off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.planner.packing import Linear, Packed, Ways

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
