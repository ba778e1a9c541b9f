"""One layer half as the simulator sees it: what a plan makes of it, with its seconds and bytes.

Seating     windows and stops of one phase ──parts──>  Part, Part, ...    in which window how many seconds run, and what
                                                                          is held more from then on; the rest on demand
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, Window, WindowAddress
from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import Stop
from megatron_lynx.cost.weight_gradient import WeightGradient
from megatron_lynx.pace import Turns
from megatron_lynx.schedule.schedule import Phase


@dataclass(frozen=True)
class Seating:
    """Where a half is replayed in one phase."""

    stretches: Sequence[tuple[Window, str | None]] = ()
    """Windows, each with the item before which the replay stops there; None: it does not stop."""
    gather: Window | None = None
    """Behind which window the replay's input is gathered, if it is."""
    gather_s: float = 0.0
    """Seconds by which that delays the replay."""
    spared_s: float = 0.0
    """Seconds by which the half's backward waits shorter for its input, because it was gathered before."""


SEATED_ON_DEMAND = Seating()


HalfKind = tuple[Section, frozenset[str]]
"""What fills a half, and which of its linears put their weight gradients off."""


class Part(NamedTuple):
    """What of a replay runs in one window."""

    half: Treated
    window: Window
    seconds: float
    taken_bytes: int
    """What is held more when it has run; less, where the replay need no longer remember how to go on."""
    gather_s: float
    """Seconds by which gathering the input delays it."""


class Deferral(NamedTuple):
    """A linear whose weight gradients are put off."""

    cost: WeightGradient
    waits: tuple[Window, ...]
    """Where they may run; the first that comes takes them."""


class Leaving(NamedTuple):
    """What of a half goes to the host and comes back where its own backward follows its forward at once."""

    bytes: int
    seconds: float
    """Of its copy, one way."""
    turns: Turns


@dataclass(frozen=True)
class Treated:
    """What becomes of one half: where its replay runs by phase, how long it takes, what it holds."""

    layer: int
    section: Section
    """What fills the half."""
    memory: HalfMemory
    replay_s: float = 0.0
    """Seconds of its replay; 0 for a half that is kept."""
    steady: Seating = SEATED_ON_DEMAND
    cooldown: Seating = SEATED_ON_DEMAND
    stops: Mapping[str, Stop] = field(default_factory=dict)
    """How far the replay is where it stops."""
    host: HostSeconds = NO_HOST_TIME
    """How long the host takes to issue it. Its replay is issued with its backward, wherever it runs."""
    deferred: Mapping[str, Deferral] = field(default_factory=dict)
    """Its linears whose weight gradients are put off."""
    leaving: Leaving | None = None
    """What of it goes to the host within its micro-batch, if anything does."""

    @property
    def half(self) -> Half:
        return self.section.half

    @property
    def kind(self) -> HalfKind:
        """What its passes are made of; halves of one kind take equally long but for what is replayed."""
        return self.section, frozenset(self.deferred)

    @property
    def replayed(self) -> bool:
        return self.replay_s > 0 or self.memory.regenerated > 0

    def gathered(self, phase: Phase) -> tuple[Window, int] | None:
        """Behind which window its input is gathered ahead of time, and what is there from then on; None where it is not."""
        gather = self._seating(phase).gather
        if gather is None or gather == ON_DEMAND or _missed(gather, phase):
            return None
        return gather, self.stops[self.section.column_parallel].bytes

    def spared(self, phase: Phase) -> tuple[WindowAddress, float] | None:
        """The wait of its backward for its own input, and by how much it is shorter because that was gathered ahead of time."""
        if not self.replayed or self.gathered(phase) is None:
            return None
        collectives = self.section.collectives("bwd", sequence_parallel=True)
        ordinal = next(at for at, each in enumerate(collectives) if each.carries == "input")
        return WindowAddress("bwd", self.layer, self.half, ordinal), self._seating(phase).spared_s

    def parts(self, phase: Phase) -> Iterator[Part]:
        """The parts of its replay for a backward of this phase, what is left for it on demand included."""
        seating, gathered = self._seating(phase), self.gathered(phase)
        done = Stop(0.0, gathered[1] if gathered else 0)
        waits = seating.gather is not None and gathered is None  # on demand, or its window was missed: no window may communicate
        stretches = [] if waits else [stretch for stretch in seating.stretches if not _missed(stretch[0], phase)]
        gather_s = seating.gather_s
        for window, until in [*stretches, (ON_DEMAND, None)]:
            stop = Stop(self.replay_s, self.memory.regenerated) if until is None else self.stops[until]
            yield Part(self, window, stop.seconds - done.seconds, stop.bytes - done.bytes, gather_s)
            done, gather_s = stop, 0.0
            if until is None:
                return

    def _seating(self, phase: Phase) -> Seating:
        return self.cooldown if phase == "cooldown" else self.steady


def _missed(window: Window, phase: Phase) -> bool:
    """Whether it lies in a forward that hides nothing."""
    return phase == "warmup" and isinstance(window, WindowAddress) and window.passing == "fwd"
