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
from megatron_lynx.cost.section import PricedSection, Progress
from megatron_lynx.pace import Turns
from megatron_lynx.timetable import PlannedHalf, Task

HalfKind = tuple[Section, frozenset[str]]
"""Section, and its linears whose weight gradients are delayed."""


class Leaving(NamedTuple):
    """Offloaded bytes of a half whose own backward follows its forward at once."""

    bytes: int
    seconds: float
    turns: Turns


@dataclass(frozen=True)
class Treated:
    """One half as planned, with its cost."""

    planned: PlannedHalf
    price: PricedSection
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
    def memory(self) -> HalfMemory:
        return self.price.memory

    @property
    def again_s(self) -> float:
        """Seconds of its recomputation, including waits, if all of it runs on demand."""
        waits_s, _ = self.gathers_s.get(ON_DEMAND, (0.0, 0.0))
        return self.price.recompute_s + self.price.communicates_s + waits_s

    @property
    def gathered_bytes(self) -> int:
        """Recomputed bytes once its input is gathered."""
        return self.price.stops[self.section.column_parallel].bytes

    def spared_s(self, gathered: Window | None) -> float:
        """Seconds saved in backward because its input was gathered after this window."""
        return 0.0 if gathered is None or gathered == ON_DEMAND else self.gathers_s[gathered][1]

    def resumes(self, task: Task) -> bool:
        """Whether a task needs the communication that an earlier task left in flight."""
        return self.planned.checkpoint and task.since is not None

    def part(self, task: Task) -> Progress:
        """Return the part of the recomputation that a task runs. It adds bytes, or frees tensors that a later part would need."""
        price, gathered = self.price, task.gathered
        begin = Progress(0.0, 0 if gathered in (None, ON_DEMAND) else self.gathered_bytes)
        waits_s = price.communicates_s
        if task.since is not None:
            begin = price.stops[task.since]
            waits_s -= sum(stop.under_way_s for stop in price.stops.values())
        end = Progress(price.recompute_s, price.memory.regenerated, waits_s=waits_s)
        if task.item is not None:
            end = price.stops[task.item]
        seconds, waits_s = end.seconds - begin.seconds + begin.again_s, end.waits_s - begin.waits_s
        if gathered is not None:
            waits_s, _ = self.gathers_s[gathered]
        return Progress(seconds, end.bytes - begin.bytes, end.under_way_s, waits_s=waits_s)


Halves = Mapping[FrameKey, Treated]
"""Halves of all chunks of a stage."""
