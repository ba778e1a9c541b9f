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
from typing import Literal, NamedTuple

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, SEND_BACKWARD, FrameKey, Window, WindowAddress
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import PricedSection, Progress, WeightGradient
from megatron_lynx.pace import Turns
from megatron_lynx.simulator.passes import Entry, Queue, Stream, TimedPass
from megatron_lynx.timeline import FLUSHED, Passes, Span
from megatron_lynx.timetable import Linear, PlannedHalf, Task, Wait


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
    def layer(self) -> int:
        return self.planned.layer

    @property
    def section(self) -> Section:
        return self.planned.section

    @property
    def half(self) -> Half:
        return self.planned.half

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


class Walk:
    """Starts `start_s` after the pass. Work in a window takes `interference` times longer. `halves`: the stage's."""

    def __init__(self, interference: float, halves: Halves, queue: Queue, start_s: float = 0.0) -> None:
        self.clock_s = start_s
        self.halves = halves
        self._queue = queue
        self._unheld: dict[Linear, int] = {}
        """Bytes of entries that their own half still holds, or that are counted as transient (`cost.moments`)."""
        self._interference = interference
        self._spans: list[Span] = []
        self._memory: list[tuple[float, int]] = []
        self._regenerated: list[tuple[float, int]] = []
        self._under_way_s = 0.0
        """Seconds left of communication begun ahead."""
        self._holds_up = False
        """Whether it uses the TP group, so that later TP collectives queue after it."""
        self._hidden_s = self._exposed_s = self._filled_s = self._unfilled_s = self._copy_wait_s = 0.0
        self._stream = Stream()
        self._leaving: deque[tuple[int, float, int]] = deque()
        """(half after which compute waits for the copy out, its end, bytes)."""
        self._back_s: dict[FrameKey, float] = {}
        """By half, the end of its copy back."""

    def compute(self, seconds: float) -> None:
        """Advance the clock. Overlapped with communication begun ahead, compute takes longer, as in a window."""
        beside_s = min(self._under_way_s, seconds * self._interference)
        self._under_way_s -= beside_s
        slower_s = beside_s - beside_s / self._interference
        self._exposed_s += slower_s
        self.clock_s += seconds + slower_s

    def hold(self, change_bytes: int, *, regenerated_bytes: int = 0) -> None:
        """Allocate bytes or, below 0, free them. `regenerated_bytes`: the recomputed part."""
        if change_bytes:
            self._memory.append((self.clock_s, change_bytes))
        if regenerated_bytes:
            self._regenerated.append((self.clock_s, regenerated_bytes))

    def regenerate(self, change_bytes: int) -> None:
        self.hold(change_bytes, regenerated_bytes=change_bytes)

    def recompute(self, half: Treated, seconds: float, window: str) -> None:
        """`window`: where it is drawn; exposed seconds are drawn as on demand."""
        if seconds:
            start_s, self.clock_s = self.clock_s, self.clock_s + seconds
            self.span("recompute", start_s, half, window)

    def on_demand(self, task: Task) -> None:
        half = self.halves[task.half]
        part = half.part(task)
        if half.resumes(task):
            self._await()
        if part.waits_s:
            start_s, self.clock_s = self.clock_s, self.clock_s + part.waits_s
            self.span("gather", start_s, half)
        self.regenerate(part.bytes)
        self.recompute(half, part.seconds, ON_DEMAND)
        self._exposed_s += part.seconds + part.waits_s
        if task.do == "begin":
            self._under_way_s, self._holds_up = part.under_way_s, not half.section.exchanges

    def _await(self) -> None:
        self.clock_s += self._under_way_s
        self._exposed_s += self._under_way_s
        self._under_way_s = 0.0

    def window(self, wait: Wait, seconds: float, during: Sequence[Task] = (), after: Sequence[Task] = ()) -> None:
        if self._holds_up or any(self.halves[task.half].resumes(task) for task in during):
            self._await()
        start_s, name = self.clock_s, str(wait.window)
        waits_s = self.during(name, during, seconds / self._interference)
        self.clock_s = max(self.clock_s, start_s + seconds) + waits_s
        if self.clock_s > start_s and isinstance(wait.window, WindowAddress):
            layer, half_name = wait.window.frame
            self._spans.append(Span("window", start_s, self.clock_s, layer, half_name, None, name, name))
        for task in after:
            if task.do == "gather":
                self.regenerate(self.halves[task.half].gathered_bytes)
            else:
                self.on_demand(task)

    def during(self, name: str, tasks: Sequence[Task], room_s: float = inf) -> float:
        """Run the tasks of a wait with room for `room_s` of work; by default for all, as in a message until it is placed. Return
        the seconds that recomputations wait for their own communication."""
        waits_s = []
        for task in tasks:
            if task.do == "recompute":
                half = self.halves[task.half]
                part = half.part(task)
                self.regenerate(part.bytes)
                fits_s = min(part.seconds, room_s)
                room_s -= fits_s
                self.recompute(half, fits_s * self._interference, name)
                self.recompute(half, part.seconds - fits_s, ON_DEMAND)
                self._hidden_s += fits_s
                self._exposed_s += part.seconds - fits_s + part.waits_s
                waits_s.append(part.waits_s)
        for entry in self._queue.due([task.linear for task in tasks if task.do == "weight_gradient"]):
            fits_s = min(entry.cost.seconds, room_s)
            room_s -= fits_s
            self._weight_gradient(entry, fits_s, name, self._interference)
        return sum(waits_s)

    def defer(self, of: Linear, pieces: Sequence[WeightGradient]) -> None:
        """Delay a weight gradient; those that no longer fit run at once."""
        self._unheld[of] = pieces[-1].bytes
        for cost in pieces:
            for oldest in self._queue.put(Entry(of, self._queue.chunk, cost)):
                self._weight_gradient(oldest, 0.0, FLUSHED)

    def holds(self, of: Linear, size_bytes: int) -> None:
        """Count `size_bytes` of a linear's newest entry to the entry alone."""
        if of in self._unheld:
            size_bytes = min(size_bytes, self._unheld[of])
            self._unheld[of] -= size_bytes
            self.hold(size_bytes)

    def flush(self, of: Linear | None = None, *, during_send: bool = False) -> None:
        """Run the pending weight gradients of a linear; by default all of the chunk."""
        for entry in self._queue.take(of):
            self._weight_gradient(entry, entry.cost.seconds if during_send else 0.0, SEND_BACKWARD if during_send else FLUSHED)

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

    def _copy(self, kind: Literal["offload", "reload"], half: Treated, leaving: Leaving) -> float:
        start_s, end_s = self._stream.copy(self.clock_s, leaving.seconds)
        self._spans.append(Span(kind, start_s, end_s, half.layer, half.half, name=f"{kind} {half.half}({half.layer})"))
        return end_s

    def _wait(self, until_s: float) -> None:
        if until_s > self.clock_s:
            self._spans.append(Span("copy_wait", self.clock_s, until_s, name="copy_wait"))
            self._copy_wait_s += until_s - self.clock_s
            self.clock_s = until_s

    def over(self) -> TimedPass:
        return TimedPass(
            self.clock_s,
            self._hidden_s,
            self._exposed_s,
            tuple(self._memory),
            tuple(self._spans),
            regenerated=tuple(self._regenerated),
            filled_s=self._filled_s,
            unfilled_s=self._unfilled_s,
            copy_wait_s=self._copy_wait_s,
        )

    def _weight_gradient(self, entry: Entry, fits_s: float, window: str, interference: float = 1.0) -> None:
        """`fits_s`: the seconds of it that fit into the wait."""
        name = f"weight gradient {entry.of.name}({entry.of.layer})"
        self.hold(entry.cost.copied_bytes)
        parts = ((fits_s, fits_s * interference, window), (rest_s := entry.cost.seconds - fits_s, rest_s, FLUSHED))
        for seconds, takes_s, where in parts:
            if seconds:
                start_s, self.clock_s = self.clock_s, self.clock_s + takes_s
                self._spans.append(Span("weight_gradient", start_s, self.clock_s, *entry.of[:2], None, where, name))
        self._filled_s += fits_s
        self._unfilled_s += rest_s
        unheld_bytes = 0
        if entry.of in self._unheld and not self._queue.holds(entry.of):
            unheld_bytes = self._unheld.pop(entry.of)
        self.hold(unheld_bytes - entry.cost.copied_bytes - entry.cost.bytes)

    def span(
        self,
        kind: Literal["forward", "backward", "recompute", "gather"],
        start_s: float,
        half: Treated,
        window: str | None = None,
    ) -> None:
        name = f"{kind} {half.half}({half.layer})"
        self._spans.append(Span(kind, start_s, self.clock_s, half.layer, half.half, None, window, name))
