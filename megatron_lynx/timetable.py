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

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
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


class Place(NamedTuple):
    stretches: tuple[tuple[Window, str | None], ...] = ((ON_DEMAND, None),)
    """Windows, each with the item before which the recomputation stops there; None: it does not stop."""
    gather: Window | None = None
    """Window after which its input is gathered; None: it is not gathered."""


ON_DEMAND_PLACE = Place()


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
    place: Place = ON_DEMAND_PLACE
    deferred: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """By linear in backward order, the waits of its delayed weight gradient: each takes the oldest pending one."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """By linear whose delayed weight gradient is cut, the number of its pieces: each wait takes the oldest pending piece."""
    checkpoint: bool = False
    """Whether it keeps at most its input: all of `recompute` is recomputed on demand, including communication. If its place is
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
        return self.section.last_communicating if self.checkpoint and self.place != ON_DEMAND_PLACE else None

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
        window_frames = [at.frame for at in self._windows() if isinstance(at, WindowAddress)]
        if self.ahead_to is not None:
            window_frames.append((self.layer + 1, HALVES[0]))
        return max((_place_in_stage(frame) + 1 - place for frame in window_frames), default=1 + self.fed_behind)

    @property
    def begins_early(self) -> bool:
        return RECV_BACKWARD in self._windows()

    def _windows(self) -> Iterator[Window | None]:
        """In which it is recomputed, or after which its input is gathered."""
        yield from (window for window, _ in self.place.stretches)
        yield self.place.gather


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
        return Pass(halves, _table({wait.window for half in halves for wait in half.waits}, {}, self._weight_gradients[chunk]))

    @once
    def backward(self, chunk: int) -> Pass:
        halves = tuple(HalfPass(half.key, tuple(self._waits("bwd", half))) for half in reversed(self.chunks[chunk]))
        places = {place for half in halves for place in (half.half, *(wait.window for wait in half.waits))}
        return Pass(halves, _table(places, self._planned[chunk], self._weight_gradients[chunk]))

    @once
    def receive(self, chunk: int) -> Pass:
        return Pass((), _table((RECV_BACKWARD,), self._planned[chunk], self._deferred[chunk]))

    @once
    def sent(self, chunk: int) -> Pass:
        return Pass((), _table((SEND_BACKWARD,), {}, self._deferred[chunk]))

    def serving(self, chunk: int) -> Iterator[tuple[Pass, FrameKey | None, Sequence[Wait]]]:
        """The waits of all passes that may serve a backward, in order."""
        yield self.receive(chunk), None, (Wait(RECV_BACKWARD),)
        backward = self.backward(chunk)
        yield from ((backward, half.half, half.waits) for half in backward.halves)

    def beside_kept(self, chunk: int) -> Timetable:
        """The same stage with one more chunk at its end: this chunk for micro-batches that keep everything."""
        kept = [PlannedHalf(half.layer, half.section) for half in self.chunks[chunk]]
        return Timetable([*self.chunks, kept], self.layout)

    @property
    def all_halves(self) -> Iterator[PlannedHalf]:
        return (half for chunk in self.chunks for half in chunk)

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
            yield Wait(WindowAddress(passing, half.layer, half.half, ordinal), (half.place.gather or ON_DEMAND) if over else None)

    @cached_property
    def _planned(self) -> tuple[Tasks, ...]:
        return tuple(_planned(halves, self.layout) for halves in self.chunks)

    @cached_property
    def _deferred(self) -> tuple[Tasks, ...]:
        return tuple(_deferred(halves) for halves in self.chunks)

    @cached_property
    def _weight_gradients(self) -> tuple[Tasks, ...]:
        """By chunk, weight gradients that run in its waits; those of other chunks run in its forwards, at the same index."""
        tables = []
        for running, deferred in enumerate(self._deferred):
            tasks = dict(deferred)
            for other, of_other in enumerate(self._deferred):
                if other == running or not of_other or not self.chunks[running]:
                    continue
                above = self.chunks[running][0].layer - self.chunks[other][0].layer
                for moment, more in _moved(of_other, above).items():
                    tasks[moment] = (*tasks.get(moment, ()), *more)
            tables.append(tasks)
        return tuple(tables)


def _table(places: Collection[FrameKey | Window], planned: Tasks, weight_gradients: Tasks) -> Tasks:
    """Tasks of both tables in these places; in a wait recomputations come first."""
    moments = (moment for moment in (*planned, *weight_gradients) if moment.place in places)
    return {moment: (*planned.get(moment, ()), *weight_gradients.get(moment, ())) for moment in moments}


def _planned(halves: Sequence[PlannedHalf], layout: Layout) -> Tasks:
    tasks: dict[Moment, tuple[Task, ...]] = {}
    for at in reversed(range(len(halves))):
        half = halves[at]
        if half.feeds or not half.recompute:
            continue
        feeding = [Task("recompute", one.key) for one in takewhile(attrgetter("feeds"), reversed(halves[:at]))]
        for moment, task in _checkpointed(half, feeding[::-1], layout) if half.checkpoint else _recomputed(half):
            tasks[moment] = (*tasks.get(moment, ()), task)
    _begin_ahead(tasks, halves, layout)
    return tasks


def _recomputed(half: PlannedHalf) -> Iterator[tuple[Moment, Task]]:
    since: str | None = None
    gather = half.place.gather
    if gather == ON_DEMAND:
        yield Moment("demand", half.key), Task("recompute", half.key, gathered=ON_DEMAND)  # no window may communicate (rule R2)
        return
    if gather is not None:
        yield Moment("after", gather), Task("gather", half.key)
    for window, until in (*half.place.stretches, (ON_DEMAND, None)):
        moment = Moment("demand", half.key) if window == ON_DEMAND else Moment("in", window)
        yield moment, Task("recompute", half.key, until, since, gather)
        if until is None:
            return
        since, gather = until, None


def _checkpointed(half: PlannedHalf, before: Sequence[Task], layout: Layout) -> Iterator[tuple[Moment, Task]]:
    """`before`: tasks that return its input. The part after its last communication may run in a wait."""
    entered, behind = Moment("enter", half.key), half.rest_after
    yield from ((entered, task) for task in before)
    if behind is None or not layout.waits("bwd", half.layer, half.section):
        yield entered, Task("recompute", half.key)
        return
    ((window, _),) = half.place.stretches
    yield entered, Task("begin", half.key, behind)
    yield Moment("in", window), Task("recompute", half.key, since=behind)


def _begin_ahead(tasks: dict[Moment, tuple[Task, ...]], halves: Sequence[PlannedHalf], layout: Layout) -> None:
    """Begin communication of layers where backward enters the attention half above them, or soon after: the MLP half above is
    freed by then. Does nothing at the top of a chunk."""
    for attention, mlp, above in zip(halves[::2], halves[1::2], halves[2::2], strict=False):
        half = mlp if mlp.leaves_under_way else attention
        item = half.leaves_under_way
        if item is None or above.section.kept_whole or not layout.waits("fwd", half.layer, half.section):
            continue
        if half is attention and attention.gathers_ahead and not above.section.core:
            continue  # its reduction would begin at the core
        entered, place = Moment("enter", mlp.key), Moment("enter", above.key)
        *before, last_task = tasks[entered]
        begin = Task("begin", half.key, item)
        if half is mlp:
            ahead = (*before, begin)
            tasks[entered] = (last_task._replace(since=item),)
            if last_task.do == "begin":
                del tasks[entered]  # the rest of it runs in a wait
        else:
            place, ahead = _place_ahead(above, layout), (begin,)
            if attention.gathers_ahead:
                gathered = attention.section.gathered
                ahead = (Task("begin", half.key, gathered),)
                tasks[Moment("core", above.key)] = (begin._replace(since=gathered),)
            tasks[entered] = (Task("recompute", attention.key, since=item), last_task)
        tasks[place] = (*tasks.get(place, ()), *ahead)


def _place_ahead(above: PlannedHalf, layout: Layout) -> Moment:
    """Moment in a half's backward at which a reduction of the same ranks begins: after the gather of the gradient, which would
    otherwise queue after it."""
    first, *_ = above.section.collectives("bwd", layout.sequence_parallel)
    gathers = first.carries == "gradient"
    return Moment("after", WindowAddress("bwd", *above.key, 0)) if gathers else Moment("enter", above.key)


def _deferred(halves: Sequence[PlannedHalf]) -> Tasks:
    tasks: dict[Moment, tuple[Task, ...]] = {}
    for half in reversed(halves):
        for linear, waits in half.deferred.items():
            for wait in waits:
                moment = Moment("in", wait)
                tasks[moment] = (*tasks.get(moment, ()), Task("weight_gradient", half.key, linear))
    return tasks


def _moved(tasks: Tasks, layers: int) -> Tasks:
    """Tasks in forwards, moved to the forward of another chunk, whose first layer is `layers` above."""
    return {
        moment._replace(place=moment.place._replace(layer=moment.place.layer + layers)): content
        for moment, content in tasks.items()
        if isinstance(moment.place, WindowAddress) and moment.place.passing == "fwd"
    }
