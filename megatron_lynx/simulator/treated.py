"""Seconds and bytes of one half's passes, and of parts of its recomputation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, FrameKey, Window
from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.prices import WeightGradient
from megatron_lynx.cost.section import Begun, Stop
from megatron_lynx.pace import Turns
from megatron_lynx.timetable import PlannedHalf, Task

HalfKind = tuple[Section, frozenset[str]]
"""Section, and its linears whose weight gradients are delayed."""


class Part(NamedTuple):
    seconds: float
    taken_bytes: int
    """Change in bytes once it has run; below 0 if it frees what a later part would need."""
    waits_s: float = 0.0
    """Seconds of delay by the input gather, or by a checkpoint's recomputed communication."""
    under_way_s: float = 0.0
    """Seconds for which its last communication is in flight when it stops."""


NOT_BEGUN = Begun(0.0, 0, 0.0, 0.0)


class Leaving(NamedTuple):
    """Offloaded bytes of a half whose own backward follows its forward at once."""

    bytes: int
    seconds: float
    turns: Turns


@dataclass(frozen=True)
class Treated:
    """One half as planned, with its cost."""

    planned: PlannedHalf
    memory: HalfMemory
    recompute_s: float = 0.0
    communicates_s: float = 0.0
    """Seconds in which a checkpoint's recomputation waits for other ranks."""
    begun: Mapping[str, Begun] = field(default_factory=dict)
    """By item, its progress when it stops there ahead."""
    stops: Mapping[str, Stop] = field(default_factory=dict)
    """By item, progress of the recomputation when it stops there."""
    gathers_s: Mapping[Window, tuple[float, float]] = field(default_factory=dict)
    """By window after which its input is gathered: seconds of delay to the recomputation, and seconds saved in the half's
    backward."""
    host: HostSeconds = NO_HOST_TIME
    """Host seconds. Its recomputation is issued with its backward, wherever it runs."""
    deferred: Mapping[str, WeightGradient] = field(default_factory=dict)
    """Linears whose weight gradients are delayed, in backward order."""
    leaving: Leaving | None = None

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
        """Halves of one kind have equal passes except for recomputation."""
        return self.section, frozenset(self.deferred)

    @property
    def again_s(self) -> float:
        """Seconds of its recomputation, including waits, if all of it runs on demand."""
        waits_s, _ = self.gathers_s.get(ON_DEMAND, (0.0, 0.0))
        return self.recompute_s + self.communicates_s + waits_s

    @property
    def _exposed_s(self) -> float:
        """Seconds of communication that is not begun ahead."""
        return self.communicates_s - sum(begun.under_way_s for begun in self.begun.values())

    @property
    def gathered_bytes(self) -> int:
        """Recomputed bytes once its input is gathered."""
        return self.stops[self.section.column_parallel].bytes

    def spared_s(self, gathered: Window | None) -> float:
        """Seconds saved in backward because its input was gathered after this window."""
        return 0.0 if gathered is None or gathered == ON_DEMAND else self.gathers_s[gathered][1]

    def resumes(self, task: Task) -> bool:
        """Whether a task needs the communication that an earlier task left in flight."""
        return task.since in self.begun

    def part(self, task: Task) -> Part:
        if task.do == "begin" or self.resumes(task):
            whole = Begun(self.recompute_s, self.memory.regenerated, 0.0, 0.0, self._exposed_s)
            start = self.begun[task.since] if task.since else NOT_BEGUN
            stop = self.begun[task.item] if task.item else whole
            seconds, waits_s = stop.seconds - start.seconds + start.again_s, stop.waits_s - start.waits_s
            return Part(seconds, stop.bytes - start.bytes, waits_s, stop.under_way_s)
        there_bytes = 0 if task.gathered in (None, ON_DEMAND) else self.gathered_bytes
        begin = Stop(0.0, there_bytes) if task.since is None else self.stops[task.since]
        end = Stop(self.recompute_s, self.memory.regenerated) if task.item is None else self.stops[task.item]
        waits_s = self.communicates_s if task.gathered is None else self.gathers_s[task.gathered][0]
        return Part(end.seconds - begin.seconds, end.bytes - begin.bytes, waits_s)


Halves = Mapping[FrameKey, Treated]
"""Halves of all chunks of a stage."""
