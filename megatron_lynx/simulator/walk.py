"""Records one pass of a stage: a clock, spans, and changes of memory.

compute ──> (window: recomputation, weight gradients, then the rest of the wait) ──> compute ──> ...

Copies half by half (docs/offloading.md): a copy out starts when its half ends and the stream is free. Its bytes are freed after
the half `turns.away`, where compute waits for the copy. Its copy back starts at the half `turns.back` of the backward, where its
bytes are allocated. These copies share no stream with copies of other chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from megatron_lynx.anatomy import Section
from megatron_lynx.anatomy.address import ON_DEMAND, SEND_BACKWARD, FrameKey, Window, WindowAddress
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.cost.section import PricedSection, Progress, WeightGradient
from megatron_lynx.pace import Turns
from megatron_lynx.simulator.passes import Entry, Pending, Stream, TimedPass
from megatron_lynx.timeline import FLUSHED, Passes, Span, SpanKind
from megatron_lynx.timetable import At, Linear, Pass, PlannedHalf, Task, Wait


class Leaving(NamedTuple):
    """Offloaded bytes of a half whose own backward follows its forward at once."""

    bytes: int
    seconds: float
    turns: Turns


@dataclass(frozen=True)
class Treated:
    planned: PlannedHalf
    price: PricedSection
    gathers_s: Mapping[Window, tuple[float, float]] = field(default_factory=dict)
    """By window after which its input is gathered: seconds of delay to the recomputation, and seconds saved in the half's
    backward."""
    host: Passes = NO_HOST_TIME
    """Host seconds. Its recomputation is issued with its backward, wherever it runs."""
    deferred: Mapping[str, WeightGradient] = field(default_factory=dict)
    """Linears whose weight gradients are delayed, in backward order."""
    leaving: Leaving | None = None

    @property
    def section(self) -> Section:
        return self.planned.section

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


class Walk:
    """Walks a pass from `start_s` after its beginning. Work in a window takes `interference` times longer.

    `deferral`: the chunk's (index, most bytes of its pending weight gradients); those over the bound run at once, oldest first.
    """

    def __init__(
        self,
        halves: Mapping[FrameKey, Treated],
        deferral: tuple[int, int],
        pending: Pending,
        through: Pass,
        interference: float = 1.0,
        start_s: float = 0.0,
    ) -> None:
        self.clock_s, self.through, self.halves, self.pending = start_s, through, halves, list(pending)
        self.unheld: dict[Linear, int] = {}
        """Bytes of entries that their own half still holds, or that are counted as transient (`cost.moments`)."""
        self._interference, (self._chunk, most_bytes) = interference, deferral
        self._room_bytes = most_bytes - sum(entry.cost.bytes for entry in pending if entry.chunk == self._chunk)
        self._spans: list[Span] = []
        self._memory: list[tuple[float, int]] = []
        self._regenerated: list[tuple[float, int]] = []
        self._under_way_s = 0.0
        """Seconds left of communication begun ahead."""
        self._holds_up = False
        """Whether it uses the TP group, so that later TP collectives queue after it."""
        self._seconds = dict.fromkeys(("hidden_s", "exposed_s", "filled_s", "unfilled_s", "copy_wait_s"), 0.0)
        """Fields of the `TimedPass`, so far."""
        self._stream = Stream()
        self._leaving: deque[tuple[int, float, int]] = deque()
        """(half after which compute waits for the copy out, its end, bytes)."""
        self._back_s: dict[FrameKey, float] = {}
        """By half, the end of its copy back."""

    def compute(self, seconds: float) -> None:
        """Advance the clock. Overlapped with communication begun ahead, compute takes longer, as in a window."""
        if self._under_way_s:
            beside_s = min(self._under_way_s, seconds * self._interference)
            self._under_way_s -= beside_s
            slower_s = beside_s - beside_s / self._interference
            self._seconds["exposed_s"] += slower_s
            seconds += slower_s
        self.clock_s += seconds

    def hold(self, change_bytes: int, regenerated_bytes: int = 0) -> None:
        """Allocate bytes or, below 0, free them. `regenerated_bytes`: the recomputed part."""
        if change_bytes:
            self._memory.append((self.clock_s, change_bytes))
        if regenerated_bytes:
            self._regenerated.append((self.clock_s, regenerated_bytes))

    def draw(self, kind: SpanKind, start_s: float, end_s: float, of: FrameKey, window: str | None = None, name: str = "") -> None:
        self._spans.append(Span(kind, start_s, end_s, *of, None, window, name or f"{kind} {of[1]}({of[0]})"))

    def _run(self, seconds: float, kind: SpanKind, of: FrameKey, window: str | None = None, name: str = "") -> None:
        """Advance the clock and draw a span. `window`: where it is drawn; exposed recomputation is drawn as on demand."""
        if seconds:
            start_s, self.clock_s = self.clock_s, self.clock_s + seconds
            self.draw(kind, start_s, self.clock_s, of, window, name)

    def on_demand(self, at: At, place: FrameKey | Window) -> None:
        """Run the tasks of a moment, exposed."""
        for task in self.through.at(at, place):
            half = self.halves[task.half]
            if task.do == "gather":
                self.hold(half.gathered_bytes, half.gathered_bytes)
                continue
            part = half.part(task)
            self.needs(task.half)
            if half.resumes(task):
                self._await()
            self._run(part.waits_s, "gather", task.half)
            self.hold(part.bytes, part.bytes)
            self._run(part.seconds, "recompute", task.half, ON_DEMAND)
            self._seconds["exposed_s"] += part.seconds + part.waits_s
            if task.do == "begin":
                self._under_way_s, self._holds_up = part.under_way_s, not half.section.exchanges

    def _await(self) -> None:
        self.clock_s += self._under_way_s
        self._seconds["exposed_s"] += self._under_way_s
        self._under_way_s = 0.0

    def window(self, wait: Wait, seconds: float) -> None:
        tasks = self.through.at("in", wait.window)
        again = [task for task in tasks if task.do == "recompute"]
        self.needs(*(task.half for task in again))
        if self._holds_up or any(self.halves[task.half].resumes(task) for task in again):
            self._await()
        start_s = self.clock_s
        waits_s = self.during(wait.window, tasks, seconds / self._interference) if tasks else 0.0
        self.clock_s = max(self.clock_s, start_s + seconds) + waits_s
        if self.clock_s > start_s and isinstance(wait.window, WindowAddress):
            name = str(wait.window)
            self.draw("window", start_s, self.clock_s, wait.window.frame, name, name)
        self.on_demand("after", wait.window)

    def during(self, window: Window, tasks: Sequence[Task], room_s: float = inf) -> float:
        """Run the tasks of a wait with room for `room_s` of work; by default for all, as in a message until it is placed. Return
        the seconds that recomputations wait for their own communication."""
        name, waits_s = str(window), 0.0
        for task in tasks:
            if task.do == "recompute":
                part = self.halves[task.half].part(task)
                self.hold(part.bytes, part.bytes)
                fits_s = min(part.seconds, room_s)
                room_s -= fits_s
                self._run(fits_s * self._interference, "recompute", task.half, name)
                self._run(part.seconds - fits_s, "recompute", task.half, ON_DEMAND)
                self._seconds["hidden_s"] += fits_s
                self._seconds["exposed_s"] += part.seconds - fits_s + part.waits_s
                waits_s += part.waits_s
        for linear in [task.linear for task in tasks if task.do == "weight_gradient"]:
            oldest = next((entry for entry in self.pending if entry.of == linear), None)
            if oldest is not None:
                fits_s = min(oldest.cost.seconds, room_s)
                room_s -= fits_s
                self._weight_gradient(oldest, fits_s, name, self._interference)
        return waits_s

    def defer(self, of: Linear, pieces: Sequence[WeightGradient]) -> None:
        """Delay a weight gradient; those that no longer fit run at once."""
        self.unheld[of] = pieces[-1].bytes
        for cost in pieces:
            self.pending.append(Entry(of, self._chunk, cost))
            self._room_bytes -= cost.bytes
            while self._room_bytes < 0:
                self._weight_gradient(next(entry for entry in self.pending if entry.chunk == self._chunk))

    def hold_operands(self, *linears: Linear, most_bytes: int | None = None) -> None:
        """Count unheld bytes of these linears' newest entries to the entries alone; of each at most `most_bytes`."""
        for of in linears:
            left_bytes = self.unheld.get(of, 0)
            size_bytes = left_bytes if most_bytes is None else min(most_bytes, left_bytes)
            if size_bytes:
                self.unheld[of] -= size_bytes
                self.hold(size_bytes)

    def flush(self, of: Linear | None = None, *, during_send: bool = False) -> None:
        """Run the pending weight gradients of a linear; by default all of the chunk."""
        for entry in [entry for entry in self.pending if (entry.chunk == self._chunk if of is None else entry.of == of)]:
            self._weight_gradient(entry, entry.cost.seconds if during_send else 0.0, SEND_BACKWARD)

    def _weight_gradient(self, entry: Entry, fits_s: float = 0.0, window: str = FLUSHED, interference: float = 1.0) -> None:
        """`fits_s`: the seconds of it that fit into the wait."""
        of, cost, name = entry.of, entry.cost, f"weight gradient {entry.of.name}({entry.of.layer})"
        self.pending.remove(entry)
        self._room_bytes += cost.bytes * (entry.chunk == self._chunk)
        self.hold(cost.copied_bytes)
        self._run(fits_s * interference, "weight_gradient", of[:2], window, name)
        self._run(cost.seconds - fits_s, "weight_gradient", of[:2], FLUSHED, name)
        self._seconds["filled_s"] += fits_s
        self._seconds["unfilled_s"] += cost.seconds - fits_s
        left = of in self.unheld and any(other.of == of for other in self.pending)
        unheld_bytes = 0 if left else self.unheld.pop(of, 0)
        self.hold(unheld_bytes - cost.copied_bytes - cost.bytes)

    def copy_out(self, place: int, half: Treated) -> None:
        """`place`: index, from 1, of the half that ends."""
        while self._leaving and self._leaving[0][0] <= place:
            _, end_s, size_bytes = self._leaving.popleft()
            self._wait(end_s)
            self.hold(-size_bytes)
        if half.leaving is not None:
            self._leaving.append((half.leaving.turns.away, self._copy("offload", half, half.leaving), half.leaving.bytes))

    def copy_back(self, place: int, away: list[Treated]) -> None:
        """`place`: index, from 1, of the half whose backward begins. `away`: halves on the host."""
        while away and (leaving := away[-1].leaving) is not None and leaving.turns.back >= place:
            half = away.pop()
            self.hold(leaving.bytes)
            self._back_s[half.planned.key] = self._copy("reload", half, leaving)

    def needs(self, *halves: FrameKey) -> None:
        """Wait for the copies back of these halves."""
        for half in halves if self._back_s else ():
            self._wait(self._back_s.get(half, 0.0))

    def _copy(self, kind: SpanKind, half: Treated, leaving: Leaving) -> float:
        start_s, end_s = self._stream.copy(self.clock_s, leaving.seconds)
        self.draw(kind, start_s, end_s, half.planned.key)
        return end_s

    def _wait(self, until_s: float) -> None:
        if until_s > self.clock_s:
            self._spans.append(Span("copy_wait", self.clock_s, until_s, name="copy_wait"))
            self._seconds["copy_wait_s"] += until_s - self.clock_s
            self.clock_s = until_s

    def over(self) -> TimedPass:
        memory, spans, regenerated = tuple(self._memory), tuple(self._spans), tuple(self._regenerated)
        return TimedPass(self.clock_s, memory=memory, spans=spans, regenerated=regenerated, **self._seconds)
