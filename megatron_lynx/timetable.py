"""The timetable of a pipeline stage: a plan and a schedule's passes as tables from moments to tasks, one for all readers.

    plan ──> PlannedHalf of each layer ──Timetable──>  a forward, the receive of a gradient, a backward, the send of a gradient

Moments and tasks of a pass:

    enter    mlp(4)             backward enters a half
    demand   mlp(4)             backward unpacks the half's first tensor
    core     attention(4)       backward reaches its core attention
    in       bwd.mlp.0@4        a wait for communication: tasks run on the compute stream, and do not communicate (rule R2)
    after    bwd.mlp.0@4        that wait is over

    recompute         a half, or the part of it between two items
    begin             a checkpointed half up to an item, whose communication is left in flight
    gather            the input of a half, once for its recomputation and its backward (sequence parallelism)
    weight_gradient   the oldest pending one of a linear, or piece of one, of any micro-batch

The plan alone decides which task runs in which wait (rule R1). A forward runs delayed weight gradients only, of any chunk: those
of another chunk at the same index of the chunk. A receive and a backward run recomputations, too. A checkpoint is recomputed
where backward enters it, or begins ahead (docs/runtime.md). An attention half may gather its input ahead, too, before it begins
its output, which the same ranks reduce:

    after bwd.attention.0@5     begin attention(4) to its first linear, whose input is gathered
    core  attention(5)          begin the rest of it, up to its reduction
    enter mlp(4)                recompute the rest of attention(4); recompute mlp(4)
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import attrgetter
from typing import Literal, NamedTuple

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy import Pass as Passing
from megatron_lynx.anatomy.address import (
    ON_DEMAND,
    RECV_BACKWARD,
    SEND_BACKWARD,
    FrameKey,
    Window,
    WindowAddress,
)
from megatron_lynx.once import once

At = Literal["enter", "demand", "core", "in", "after"]


class Moment(NamedTuple):
    at: At
    place: FrameKey | Window
    """A window for `in` and `after`, else a half."""


class Linear(NamedTuple):
    """For experts, the item that stands for their linears."""

    layer: int
    half: Half
    name: str


class Task(NamedTuple):
    do: Literal["recompute", "begin", "gather", "weight_gradient"]
    half: FrameKey
    item: str | None = None
    """`recompute`: the item before which it stops, None for the last needed one. `begin`: the item whose communication is left in
    flight. Weight gradient: the linear."""
    since: str | None = None
    """The item at which the part before stopped; None for the first part."""
    gathered: Window | None = None
    """Window after which a first part's input is gathered; `on_demand`: just before this task."""

    @property
    def linear(self) -> Linear:
        assert self.item is not None, "a weight gradient is of a linear"
        return Linear(*self.half, self.item)


class Wait(NamedTuple):
    window: Window
    gathered: Window | None = None
    """Window after which, or `on_demand` where, its input was already gathered for a recomputation. Such a wait takes no time and
    is not a window."""

    @property
    def over(self) -> bool:
        return self.gathered is not None


class HalfPass(NamedTuple):
    half: FrameKey
    waits: tuple[Wait, ...] = ()


Tasks = Mapping[Moment, tuple[Task, ...]]


@dataclass(frozen=True)
class Pass:
    """The receive of a gradient has no halves."""

    halves: tuple[HalfPass, ...] = ()
    tasks: Tasks = field(default_factory=dict)

    def at(self, at: At, place: FrameKey | Window) -> tuple[Task, ...]:
        return self.tasks.get((at, place), ())  # type: ignore[call-overload, no-any-return]

    @cached_property
    def busy(self) -> frozenset[Window]:
        """Windows with a task in or after them."""
        return frozenset(moment.place for moment in self.tasks if moment.at in ("in", "after"))  # type: ignore[misc]

    @cached_property
    def hides(self) -> bool:
        """Whether a receive hides any recomputation."""
        return any(task.do == "recompute" for tasks in self.tasks.values() for task in tasks)

    @cached_property
    def busy_halves(self) -> frozenset[FrameKey]:
        """Halves with such a window, or where something begins."""
        waiting = (window.frame for window in self.busy if isinstance(window, WindowAddress))
        return frozenset((*waiting, *self.beginning("enter", "core")))

    def beginning(self, *at: At) -> frozenset[FrameKey]:
        """Halves at such a moment of which something begins."""
        begins = (
            moment.place for moment, tasks in self.tasks.items() if moment.at in at and any(task.do == "begin" for task in tasks)
        )
        return frozenset(begins)  # type: ignore[arg-type]


class Layout(NamedTuple):
    """Facts that decide the waits of a stage's halves. `exchanging`: layers whose expert exchanges are windows."""

    collectives: bool = True
    sequence_parallel: bool = False
    exchanging: Container[int] = ()

    def waits(self, passing: Passing, layer: int, section: Section) -> int:
        """Waits inside CUDA graphs cannot be used."""
        if section.captured:
            return 0
        if section.exchanges:
            return len(section.exchanges_of[passing]) if layer in self.exchanging else 0
        return len(section.collectives(passing, self.sequence_parallel)) if self.collectives else 0


def ahead_to(section: Section, *, experts: bool, feeds: bool) -> str | None:
    """Return the item up to which a checkpointed half is recomputed during the backward of the layer above.

    `experts`: whether the layer has experts; then its dispatch is in flight meanwhile, else the reduction of its attention
    output. `feeds`: whether the next half's recomputation needs the half's output.
    """
    if section.exchanges:
        return section.item("dispatch").name
    if not feeds:
        return None
    return section.residual if experts else section.row_parallel


def may_gather_ahead(section: Section, *, experts: bool, feeds: bool) -> bool:
    """Whether the input of such a half may be gathered ahead, before its output is reduced."""
    return feeds and not experts and bool(section.gathered and section.core)


@dataclass(frozen=True)
class PlannedHalf:
    layer: int
    section: Section
    recompute: Collection[str] = ()
    """Recomputed items, in forward order."""
    stretches: tuple[tuple[Window, str | None], ...] = ((ON_DEMAND, None),)
    """Windows in which it is recomputed, each with the item before which recomputation stops there; None: it does not stop."""
    gathered: Window | None = None
    """Window after which its input is gathered for that; None: it is not gathered."""
    deferred: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """By linear in backward order, the waits of its delayed weight gradient: each takes the oldest pending one."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """By linear whose delayed weight gradient is cut, the number of its pieces: each wait takes the oldest pending piece."""
    checkpoint: bool = False
    """Whether it keeps at most its input: all of `recompute` is recomputed on demand, including communication. If its window is
    the first wait of that half's backward, the part after its last communication runs there."""
    fed_behind: int = 0
    """Number of halves after this checkpointed one that get their input from its recomputation."""
    ahead_to: str | None = None
    """Item up to which this checkpointed half is recomputed when backward enters the attention half of the layer above; the
    item's communication is in flight meanwhile. The half's last item: all of it has run; None: it begins when backward enters it.
    """
    gathers_ahead: bool = False
    """Whether its input is gathered ahead, before that."""

    @cached_property
    def half(self) -> Half:
        return self.section.half

    def delayed(self, *, drains: bool) -> frozenset[str]:
        return frozenset(linear for linear in self.deferred if self.delays(linear, drains=drains))

    def delays(self, linear: str, *, drains: bool) -> bool:
        """Whether a linear delays its weight gradient in one backward. `drains`: it is in cool-down, or its chunk's last: only
        then does a later stage's gradient reach the stage before sooner than it is needed there."""
        return linear in self.deferred and (drains or self.deferred[linear] != (SEND_BACKWARD,))

    @cached_property
    def feeds(self) -> bool:
        return self.fed_behind > 0

    @cached_property
    def key(self) -> FrameKey:
        return self.layer, self.section.half

    @property
    def leaves_under_way(self) -> str | None:
        """The item whose communication is in flight, if it begins ahead."""
        return None if self.ahead_to == self.section.residual else self.ahead_to

    @property
    def rest_after(self) -> str | None:
        """The item of a checkpointed half after whose communication the rest is recomputed in the first wait of its backward;
        None: all of it is recomputed when backward enters it."""
        return self.section.last_communicating if self.checkpoint and self.stretches[0][0] != ON_DEMAND else None

    @property
    def gathers(self) -> bool:
        """Whether the input of its recomputation is gathered once, so that backward need not gather it again. A checkpoint
        gathers it as a forward does, into a shared buffer: kept, it would be the checkpoint's largest block."""
        return self.section.column_parallel in self.recompute and not self.checkpoint

    @cached_property
    def ahead(self) -> int:
        """Number of halves before its own backward at which its recomputation or gather may begin. The receive of a gradient does
        not count: no recomputation of a micro-batch runs between its forward and its backward."""
        place = _place_in_stage(self.key)
        window_frames = [at.frame for at in self.windows if isinstance(at, WindowAddress)]
        if self.ahead_to is not None:
            window_frames.append((self.layer + 1, HALVES[0]))
        return max((_place_in_stage(frame) + 1 - place for frame in window_frames), default=1 + self.fed_behind)

    @property
    def windows(self) -> tuple[Window | None, ...]:
        """In which it is recomputed, or after which its input is gathered."""
        return (*(window for window, _ in self.stretches), self.gathered)


def _place_in_stage(key: FrameKey) -> int:
    layer, half = key
    return len(HALVES) * layer + HALVES.index(half)


class Timetable:
    """`chunks`: for each chunk, its halves in forward order; one chunk may have no layers."""

    def __init__(self, chunks: Sequence[Sequence[PlannedHalf]] = ((),), layout: Layout = Layout()) -> None:  # noqa: B008
        self.chunks = tuple(map(tuple, chunks))
        self.layout = layout

    @once
    def forward(self, chunk: int) -> Pass:
        halves = tuple(HalfPass(half.key, tuple(self._waits("fwd", half))) for half in self.chunks[chunk])
        return self._pass(chunk, halves, {wait.window for half in halves for wait in half.waits})

    @once
    def backward(self, chunk: int) -> Pass:
        halves = tuple(HalfPass(half.key, tuple(self._waits("bwd", half))) for half in reversed(self.chunks[chunk]))
        windows = {wait.window for half in halves for wait in half.waits}
        return self._pass(chunk, halves, {*windows, *(half.half for half in halves)})

    @once
    def receive(self, chunk: int) -> Pass:
        return self._pass(chunk, (), {RECV_BACKWARD})

    @once
    def sent(self, chunk: int) -> Pass:
        return self._pass(chunk, (), {SEND_BACKWARD})

    def serving(self, chunk: int) -> Iterator[tuple[Pass, FrameKey | None, Sequence[Wait]]]:
        """The waits of all passes that may serve a backward, in order."""
        yield self.receive(chunk), None, (Wait(RECV_BACKWARD),)
        backward = self.backward(chunk)
        yield from ((backward, half.half, half.waits) for half in backward.halves)

    def beside_kept(self, chunk: int) -> Timetable:
        """The same stage with one more chunk at its end: this chunk for micro-batches that keep everything."""
        kept = [PlannedHalf(half.layer, half.section) for half in self.chunks[chunk]]
        return Timetable([*self.chunks, kept], self.layout)

    @cached_property
    def core_halves(self) -> frozenset[FrameKey]:
        return frozenset[FrameKey]().union(*(self.backward(chunk).beginning("core") for chunk in range(len(self.chunks))))

    @cached_property
    def busy_halves(self) -> tuple[frozenset[FrameKey], ...]:
        return tuple(self.forward(chunk).busy_halves | self.backward(chunk).busy_halves for chunk in range(len(self.chunks)))

    def _waits(self, passing: Passing, half: PlannedHalf) -> Iterator[Wait]:
        gathered = passing == "bwd" and self.layout.sequence_parallel and half.gathers and not half.section.exchanges
        for ordinal in range(self.layout.waits(passing, half.layer, half.section)):
            over = gathered and half.section.collectives("bwd", True)[ordinal].carries == "input"
            yield Wait(WindowAddress(passing, half.layer, half.half, ordinal), (half.gathered or ON_DEMAND) if over else None)

    def _pass(self, chunk: int, halves: tuple[HalfPass, ...], places: Container[FrameKey | Window]) -> Pass:
        return Pass(halves, {moment: tasks for moment, tasks in self._tasks[chunk].items() if moment.place in places})

    @cached_property
    def _tasks(self) -> tuple[Tasks, ...]:
        """By chunk, its recomputations, then its weight gradients, then those of other chunks that run in its forwards, at the
        same index."""
        tables, deferred = [], [tuple(_deferred(halves)) for halves in self.chunks]
        for halves, own in zip(self.chunks, deferred, strict=True):
            others = [
                moved
                for other, tasks in zip(self.chunks, deferred, strict=True)
                if other is not halves and halves and tasks
                for moved in _moved(tasks, halves[0].layer - other[0].layer)
            ]
            table = dict[Moment, tuple[Task, ...]]()
            for moment, task in (*_planned(halves, self.layout), *own, *others):
                table[moment] = (*table.get(moment, ()), task)
            tables.append(table)
        return tuple(tables)


def _planned(halves: Sequence[PlannedHalf], layout: Layout) -> Iterator[tuple[Moment, Task]]:
    for at in reversed(range(len(halves))):
        half = halves[at]
        if half.feeds or not half.recompute:
            continue
        if half.checkpoint:
            feeding = [*takewhile(attrgetter("feeds"), reversed(halves[:at]))]
            above = halves[at + 1] if half.half == HALVES[1] and at + 1 < len(halves) else None
            yield from _checkpointed((*reversed(feeding), half), above, layout)
        else:
            yield from _recomputed(half)


def _recomputed(half: PlannedHalf) -> Iterator[tuple[Moment, Task]]:
    since: str | None = None
    gather = half.gathered
    if gather == ON_DEMAND:
        yield Moment("demand", half.key), Task("recompute", half.key, gathered=ON_DEMAND)  # no window may communicate (rule R2)
        return
    if gather is not None:
        yield Moment("after", gather), Task("gather", half.key)
    for window, until in (*half.stretches, (ON_DEMAND, None)):
        moment = Moment("demand", half.key) if window == ON_DEMAND else Moment("in", window)
        yield moment, Task("recompute", half.key, until, since, gather)
        if until is None:
            return
        since, gather = until, None


def _checkpointed(halves: Sequence[PlannedHalf], above: PlannedHalf | None, layout: Layout) -> Iterator[tuple[Moment, Task]]:
    """Yield the recomputation of halves of which all but the last feed the next. It runs where backward enters the last one;
    parts begin ahead or run in a wait. `above`: the attention half of the layer above, if there is one."""
    last = halves[-1]
    entered, behind = Moment("enter", last.key), last.rest_after
    for half in halves:
        place, stops = entered, _begun_ahead(half, above, layout)
        if half is last and behind is not None and layout.waits("bwd", half.layer, half.section):
            place, stops = Moment("in", half.stretches[0][0]), stops or [(entered, behind)]
        elif half is not last:
            place = next((moment for moment, _ in _begun_ahead(last, above, layout)), entered)
        since: str | None = None
        for moment, item in stops:
            yield moment, Task("begin", half.key, item, since)
            since = item
        yield place, Task("recompute", half.key, since=since)


def _begun_ahead(half: PlannedHalf, above: PlannedHalf | None, layout: Layout) -> list[tuple[Moment, str | None]]:
    """Return the items up to which a half is recomputed ahead, whose communication is left in flight, and when: where backward
    enters the attention half above, or soon after, since the MLP half above is freed by then. A reduction of the same ranks
    begins after the gather of the gradient, which would otherwise queue after it."""
    item = half.leaves_under_way
    if item is None or above is None or above.section.kept_whole or not layout.waits("fwd", half.layer, half.section):
        return []
    if half.gathers_ahead and not above.section.core:
        return []  # its reduction would begin at the core
    begins = Moment("enter", above.key)
    if half.half == HALVES[0]:
        first, *_ = above.section.collectives("bwd", layout.sequence_parallel)
        begins = Moment("after", WindowAddress("bwd", *above.key, 0)) if first.carries == "gradient" else begins
    if half.gathers_ahead:
        return [(begins, half.section.gathered), (Moment("core", above.key), item)]
    return [(begins, item)]


def _deferred(halves: Sequence[PlannedHalf]) -> Iterator[tuple[Moment, Task]]:
    for half in reversed(halves):
        for linear, waits in half.deferred.items():
            yield from ((Moment("in", wait), Task("weight_gradient", half.key, linear)) for wait in waits)


def _moved(tasks: Iterable[tuple[Moment, Task]], layers: int) -> Iterator[tuple[Moment, Task]]:
    """Yield the tasks in forwards, moved to the forward of another chunk, whose first layer is `layers` above."""
    for moment, task in tasks:
        if isinstance(moment.place, WindowAddress) and moment.place.passing == "fwd":
            yield moment._replace(place=moment.place._replace(layer=moment.place.layer + layers)), task
