"""Places of a half's recomputation, and its exposed seconds.

    Seat
      ├── placement   Placement: Portion, Portion, ...
      └── gather      collective after which the input is gathered, if it is (sequence parallelism)

A portion is a window, the seconds of it that this recomputation may use, and the items that run there. A placement without
portions is on demand: recomputation starts when backward asks for its first tensor, and nothing hides it.

`held_in` derives the bytes of a half at each moment:

windows of       attention(3)        mlp(2): the half before    attention(2): the half itself
                 [A]       [B]       [A]       [B]              [A]
recomputed       ahead[3]  ahead[2]  ahead[1]  ahead[0]         whole ... until the half's own backward ends
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from megatron_lynx.anatomy import ATTENTION, HALVES, MLP, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, Stretch, WindowAddress, in_words, window_at
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import Progress


class Portion(NamedTuple):
    """Part of a window, and the part of a recomputation that runs there."""

    window: str
    seconds: float
    runs_s: float = inf
    """Seconds of recomputation that run there: up to `until`, or all that is left."""
    until: str | None = None
    """Item before which it stops."""


class Placement(tuple[Portion, ...]):
    """Portions of windows in which a half is recomputed, in order."""

    __slots__ = ()

    @property
    def on_demand(self) -> bool:
        return not self

    def hidden_s(self, recompute_s: float, interference: float) -> float:
        """Return the seconds of recomputation that the windows hide. In a window it takes `interference` times as long."""
        left_s, hidden_s = recompute_s, 0.0
        for portion in self:
            runs_s = min(left_s, portion.runs_s)
            left_s, hidden_s = left_s - runs_s, hidden_s + min(runs_s, portion.seconds / interference)
        return hidden_s

    @property
    def window(self) -> str:
        """As written in a plan file."""
        rest = () if not self or self[-1].until is None else (Stretch(ON_DEMAND),)
        return in_words((*(Stretch(portion.window, portion.until) for portion in self), *rest))


NOWHERE = Placement()


@dataclass(frozen=True)
class Seat:
    """Where a half is recomputed."""

    placement: Placement = NOWHERE
    gather: str | None = None
    gather_s: float = 0.0
    """Exposed seconds of that gather."""
    spared_s: float = 0.0
    """Seconds by which the half's backward waits less for its input, because it was gathered before."""
    stays: bool = False
    """Whether the recomputation communicates, so that it may run in no other wait."""

    def exposed_s(self, recompute_s: float, interference: float) -> float:
        return max(0.0, recompute_s - self.placement.hidden_s(recompute_s, interference)) + self.gather_s


ON_DEMAND_SEAT = Seat()


def held_in(
    memory: HalfMemory,
    section: Section,
    placement: Placement,
    gather: str | None,
    stops: Mapping[str, Progress],
    *,
    sequence_parallel: bool,
    exchanges: int = 0,
    attention: Section = ATTENTION,
) -> HalfMemory:
    """Return the memory of a half with this placement.

    memory: on demand.
    gather: window after which the input is gathered.
    exchanges: number of exchanges in the backward of the half before, if these are its windows.
    attention: section of attention halves.
    """
    steps: list[tuple[str, int]] = []
    if gather is not None and gather != ON_DEMAND:
        steps.append((gather, stops[section.column_parallel].bytes))
    for portion in placement:
        steps.append((portion.window, memory.regenerated if portion.until is None else stops[portion.until].bytes))
    ahead_bytes = [0] * len(memory.ahead)
    for window, size in steps:
        ahead = moments_ahead(window, section.half, sequence_parallel=sequence_parallel, exchanges=exchanges, attention=attention)
        ahead_bytes[:ahead] = [size] * min(ahead, len(ahead_bytes))
    first, second, third, fourth = ahead_bytes
    return replace(memory, ahead=(first, second, third, fourth))


@lru_cache(maxsize=256)
def moments_ahead(window: str, half: Half, *, sequence_parallel: bool, exchanges: int = 0, attention: Section = ATTENTION) -> int:
    """Return how many moments before a half's own backward a window of an earlier backward begins; 0 for its own windows."""
    at = window_at(window, 0)
    assert isinstance(at, WindowAddress), f"{window} is no collective"
    count = 2 * at.layer + HALVES.index(at.half) - HALVES.index(half)
    section = attention if at.half == attention.half else MLP
    last = (exchanges if at.half == MLP.half else 0) or len(section.collectives("bwd", sequence_parallel))
    return 2 * count - (at.ordinal == last - 1) if count else 0
