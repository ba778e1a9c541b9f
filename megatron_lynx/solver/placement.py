"""Where the replay of a half runs, and how much of it is then exposed.

    Seat
      ├── steady      Placement: Portion, Portion, ...    for backwards that follow a forward
      ├── cooldown    Placement                           for backwards that follow another backward
      └── gather      behind which collective the replay's input is gathered, if it is (sequence parallelism)

A portion is a window with the seconds of it that this replay may use, and what of the replay runs there. A placement without
portions is on demand: the replay runs when backward asks for its first tensor, and nothing hides it.

What a half holds, and when, follows from it (`held_in`):

windows of       stage's receive             ...  attention(3)        mlp(2): the half before    attention(2): the half itself
                                                  [A]       [B]       [A]       [B]              [A]
what is made     early ............................................................. until the half's own backward is over
in them is               ahead[3]            ahead[3]  ahead[2]  ahead[1]  ahead[0]            whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import NamedTuple

from megatron_lynx.anatomy import ATTENTION, HALVES, MLP, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, Stretch, WindowAddress, in_words, window_at
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import Stop


class Portion(NamedTuple):
    """The part of a window that one replay may use, and the part of the replay that runs there."""

    window: str
    seconds: float
    runs_s: float = inf
    """Seconds of the replay that run there: all that is left, or what comes before `until`."""
    until: str | None = None
    """The item before which it stops."""


class Placement(tuple[Portion, ...]):
    """The portions of windows in which a half is replayed, in the order in which they come."""

    __slots__ = ()

    @classmethod
    def in_window(cls, window: str, seconds: float) -> Placement:
        """All of one window, which hides no other replay."""
        return cls((Portion(window, seconds),))

    @property
    def on_demand(self) -> bool:
        return not self

    @property
    def seconds(self) -> float:
        """How long its windows are together."""
        return sum(portion.seconds for portion in self)

    def hidden_s(self, replay_s: float, interference: float) -> float:
        """Seconds of a replay that the windows hide. In a window it runs `interference` times longer than alone."""
        left_s, hidden_s = replay_s, 0.0
        for portion in self:
            runs_s = min(left_s, portion.runs_s)
            left_s, hidden_s = left_s - runs_s, hidden_s + min(runs_s, portion.seconds / interference)
        return hidden_s

    @property
    def window(self) -> str:
        """What a plan file says."""
        rest = () if not self or self[-1].until is None else (Stretch(ON_DEMAND),)
        return in_words((*(Stretch(portion.window, portion.until) for portion in self), *rest))

    @property
    def in_receive(self) -> bool:
        """Whether some of it runs while the stage waits for the gradient."""
        return any(portion.window == RECV_BACKWARD for portion in self)


NOWHERE = Placement()


@dataclass(frozen=True)
class Seat:
    """Where one half of a layer is replayed, in both phases of a step."""

    steady: Placement = NOWHERE
    cooldown: Placement = NOWHERE
    steady_share: float = 1.0
    """The part of the micro-batches whose backward is steady."""
    gather: str | None = None
    gather_s: float = 0.0
    """Seconds of that gather which nothing hides."""
    spared_s: float = 0.0
    """Seconds by which the half's backward waits shorter for its input, because it was gathered before."""
    stays: bool = False
    """Whether the replay communicates, so that no other wait may have it."""

    @property
    def begins_early(self) -> bool:
        """Whether anything of it comes before the stage's backward."""
        return self.steady.in_receive or self.cooldown.in_receive

    def exposed_s(self, replay_s: float, interference: float) -> float:
        """Seconds of a replay that its windows do not hide, the mean over both phases."""
        steady, cooldown = (
            max(0.0, replay_s - placement.hidden_s(replay_s, interference)) for placement in (self.steady, self.cooldown)
        )
        return self.steady_share * steady + (1 - self.steady_share) * cooldown + self.gather_s


ON_DEMAND_SEAT = Seat()


def held_in(
    memory: HalfMemory,
    half: Half,
    placement: Placement,
    gather: str | None,
    stops: Mapping[str, Stop],
    *,
    sequence_parallel: bool,
    exchanges: int = 0,
    attention: Section = ATTENTION,
) -> HalfMemory:
    """What is held where it is replayed there. `memory`: on demand. `gather`: behind which window its input is gathered.
    `exchanges`: of the backward of the half before, where these are its windows. `attention`: what fills attention halves."""
    sections = {attention.half: attention, MLP.half: MLP}
    steps: list[tuple[str, int]] = []
    if gather is not None and gather != ON_DEMAND:
        steps.append((gather, stops[sections[half].column_parallel].bytes))
    for portion in placement:
        steps.append((portion.window, memory.regenerated if portion.until is None else stops[portion.until].bytes))
    early, there = 0, [0] * len(memory.ahead)
    for window, size in steps:
        if window == RECV_BACKWARD:
            early = size
            continue
        ahead = moments_ahead(window, half, sequence_parallel=sequence_parallel, exchanges=exchanges, attention=attention)
        there[:ahead] = [size] * min(ahead, len(there))
    first, second, third, fourth = (max(0, size - early) for size in there)
    return replace(memory, early=early, ahead=(first, second, third, fourth))


@lru_cache(maxsize=256)
def moments_ahead(window: str, half: Half, *, sequence_parallel: bool, exchanges: int = 0, attention: Section = ATTENTION) -> int:
    """How many moments before a half's own backward begins a window of an earlier backward is: 0 for its own."""
    at = window_at(window, 0)
    assert isinstance(at, WindowAddress), f"{window} is no collective"
    count = 2 * at.layer + HALVES.index(at.half) - HALVES.index(half)
    section = attention if at.half == attention.half else MLP
    last = (exchanges if at.half == MLP.half else 0) or len(section.collectives("bwd", sequence_parallel))
    return 2 * count - (at.ordinal == last - 1) if count else 0
