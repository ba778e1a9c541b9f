"""What one half of a stage costs, whatever its timetable does with it: seconds and bytes of its passes and of parts of its
replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, FrameKey, Window
from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import Begun, Stop
from megatron_lynx.cost.weight_gradient import WeightGradient
from megatron_lynx.pace import Turns
from megatron_lynx.timetable import PlannedHalf, Task

HalfKind = tuple[Section, frozenset[str]]
"""What fills a half, and which of its linears put their weight gradients off."""


class Part(NamedTuple):
    """What a part of a half's replay costs."""

    seconds: float
    taken_bytes: int
    """What is held more when it has run; less, where the replay need no longer remember how to go on."""
    waits_s: float = 0.0
    """Seconds by which gathering the input, or what else a checkpoint communicates again, delays it."""
    under_way_s: float = 0.0
    """Seconds for which what it communicates last is under way when it stops."""


NOT_BEGUN = Begun(0.0, 0, 0.0, 0.0)


class Leaving(NamedTuple):
    """What of a half goes to the host and comes back where its own backward follows its forward at once."""

    bytes: int
    seconds: float
    """Of its copy, one way."""
    turns: Turns


@dataclass(frozen=True)
class Treated:
    """One half as a plan treats it, with what that costs."""

    planned: PlannedHalf
    memory: HalfMemory
    replay_s: float = 0.0
    """Seconds of its replay; 0 for a half that is kept."""
    communicates_s: float = 0.0
    """Seconds in which the replay of a checkpoint waits for other ranks, as its forward did."""
    begun: Mapping[str, Begun] = field(default_factory=dict)
    """By item, how far it is where it stops there ahead."""
    stops: Mapping[str, Stop] = field(default_factory=dict)
    """How far the replay is where it stops."""
    gathers_s: Mapping[Window, tuple[float, float]] = field(default_factory=dict)
    """By the window behind which its input may be gathered: seconds by which that delays the replay, and by which the half's
    backward waits shorter for its input, because it was gathered before."""
    host: HostSeconds = NO_HOST_TIME
    """How long the host takes to issue it. Its replay is issued with its backward, wherever it runs."""
    deferred: Mapping[str, WeightGradient] = field(default_factory=dict)
    """Its linears whose weight gradients are put off, in the order in which backward reaches them."""
    leaving: Leaving | None = None
    """What of it goes to the host within its micro-batch, if anything does."""

    @property
    def key(self) -> FrameKey:
        return self.planned.key

    @property
    def layer(self) -> int:
        return self.planned.layer

    @property
    def section(self) -> Section:
        return self.planned.section

    @property
    def half(self) -> Half:
        return self.planned.half

    @property
    def kind(self) -> HalfKind:
        """What its passes are made of; halves of one kind take equally long but for what is replayed."""
        return self.section, frozenset(self.deferred)

    @property
    def again_s(self) -> float:
        """Seconds of its replay, and of what that waits for, where all of it runs on demand."""
        waits_s, _ = self.gathers_s.get(ON_DEMAND, (0.0, 0.0))
        return self.replay_s + self.communicates_s + waits_s

    @property
    def _exposed_s(self) -> float:
        """The part of what it communicates that is not under way ahead."""
        return self.communicates_s - sum(begun.under_way_s for begun in self.begun.values())

    @property
    def gathered_bytes(self) -> int:
        """What is there when its input is gathered."""
        return self.stops[self.section.column_parallel].bytes

    def spared_s(self, gathered: Window | None) -> float:
        """By how much the wait of its backward for its input is shorter because that was gathered ahead of time, behind this
        window."""
        return 0.0 if gathered is None or gathered == ON_DEMAND else self.gathers_s[gathered][1]

    def resumes(self, task: Task) -> bool:
        """Whether a task needs what the one before it left in flight."""
        return task.since in self.begun

    def part(self, task: Task) -> Part:
        """The cost of a part of its replay."""
        if task.do == "begin" or self.resumes(task):
            whole = Begun(self.replay_s, self.memory.regenerated, 0.0, 0.0, self._exposed_s)
            start = self.begun[task.since] if task.since else NOT_BEGUN
            stop = self.begun[task.item] if task.item else whole
            seconds, waits_s = stop.seconds - start.seconds + start.again_s, stop.waits_s - start.waits_s
            return Part(seconds, stop.bytes - start.bytes, waits_s, stop.under_way_s)
        there_bytes = 0 if task.gathered in (None, ON_DEMAND) else self.gathered_bytes
        begin = Stop(0.0, there_bytes) if task.since is None else self.stops[task.since]
        end = Stop(self.replay_s, self.memory.regenerated) if task.item is None else self.stops[task.item]
        waits_s = self.communicates_s if task.gathered is None else self.gathers_s[task.gathered][0]
        return Part(end.seconds - begin.seconds, end.bytes - begin.bytes, waits_s)


Halves = Mapping[FrameKey, Treated]
"""The halves of all chunks of a stage."""
