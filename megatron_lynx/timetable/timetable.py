"""The timetable of a pipeline stage: a plan and a schedule's passes as tables of tasks, computed once for all readers.

    plan ──> PlannedHalf of each layer ──Timetable──>  forward(chunk)          a forward
                                                       receive(chunk, phase)   the receive of a gradient
                                                       sent(chunk)             the send of the input's gradient
                                                       backward(chunk, phase)  a backward

    readers          the validator         each recomputation finds its window, in time and within the ahead depth
                     the runtime           tasks to run at a moment
                     the simulator         seconds and bytes of each task
                     the filler            time left in waits

The plan alone decides which task runs in which wait (rule R1), by pass and phase. A forward runs delayed weight gradients only,
of any chunk: those of another chunk at the same index of the chunk. A receive and a backward run recomputations, too, which in
cool-down may be others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from megatron_lynx.anatomy import Pass as Passing
from megatron_lynx.anatomy.address import (
    BACKWARD_PHASES,
    ON_DEMAND,
    RECV_BACKWARD,
    SEND_BACKWARD,
    BackwardPhase,
    FrameKey,
    Window,
    WindowAddress,
)
from megatron_lynx.schedule.schedule import Phase
from megatron_lynx.timetable.events import At, HalfPass, Layout, Moment, Pass, PlannedHalf, Task, Tasks, Wait

AT_HALVES: tuple[At, ...] = ("enter", "demand", "core")
IN_WAITS: tuple[At, ...] = ("in", "after")


class Timetable:
    """Timetable of one stage. `chunks`: for each chunk, its halves in forward order; one chunk may have no layers."""

    def __init__(self, chunks: Sequence[Sequence[PlannedHalf]] = ((),), layout: Layout = Layout()) -> None:  # noqa: B008
        self.chunks = tuple(map(tuple, chunks))
        self.layout = layout
        self._forwards: dict[int, Pass] = {}
        self._backwards: dict[tuple[int, Phase], Pass] = {}
        self._known: dict[tuple[int, Phase], Tasks] = {}

    def forward(self, chunk: int) -> Pass:
        if chunk not in self._forwards:
            halves = tuple(HalfPass(half.key, tuple(self._waits("fwd", half))) for half in self.chunks[chunk])
            moments = (Moment("in", wait.window) for half in halves for wait in half.waits)
            self._forwards[chunk] = Pass(halves, _table(moments, {}, self._weight_gradients[chunk]))
        return self._forwards[chunk]

    def backward(self, chunk: int, phase: Phase) -> Pass:
        if (chunk, phase) not in self._backwards:
            planned = self._planned(chunk, phase)
            halves = tuple(
                HalfPass(half.key, tuple(self._waits("bwd", half, half.place(phase).gather or ON_DEMAND)))
                for half in reversed(self.chunks[chunk])
            )
            at_halves = [Moment(at, half.half) for half in halves for at in AT_HALVES]
            moments = (*at_halves, *(Moment(at, wait.window) for half in halves for wait in half.waits for at in IN_WAITS))
            self._backwards[chunk, phase] = Pass(halves, _table(moments, planned, self._weight_gradients[chunk]))
        return self._backwards[chunk, phase]

    def receive(self, chunk: int, phase: Phase) -> Pass:
        return Pass((), _table([Moment("in", RECV_BACKWARD)], self._planned(chunk, phase), self._deferred[chunk]))

    def sent(self, chunk: int) -> Pass:
        """Weight gradients that run once the gradient of the chunk's input is sent."""
        return Pass((), _table([Moment("in", SEND_BACKWARD)], {}, self._deferred[chunk]))

    def serving(self, chunk: int, phase: BackwardPhase) -> Iterator[tuple[Pass, FrameKey | None, Sequence[Wait]]]:
        """Yield the waits of all passes that may serve a backward, in order: the receive of its gradient, and the backward
        itself, half by half."""
        yield self.receive(chunk, phase), None, (Wait(RECV_BACKWARD),)
        backward = self.backward(chunk, phase)
        yield from ((backward, half.half, half.waits) for half in backward.halves)

    def beside_kept(self, chunk: int) -> Timetable:
        """The same stage with one more chunk at its end: this chunk for micro-batches that keep everything."""
        kept = [PlannedHalf(half.layer, half.section) for half in self.chunks[chunk]]
        return Timetable([*self.chunks, kept], self.layout)

    @property
    def all_halves(self) -> Iterator[PlannedHalf]:
        return (half for chunk in self.chunks for half in chunk)

    @cached_property
    def in_collectives(self) -> bool:
        """Whether anything runs in or after a collective or an exchange."""
        return any(self.busy_halves)

    @cached_property
    def core_halves(self) -> frozenset[FrameKey]:
        """Halves at whose core attention something begins."""
        passes = (backward for chunk in range(len(self.chunks)) for backward in self._backwards_of(chunk))
        return frozenset[FrameKey]().union(*(backward.core_halves for backward in passes))

    @cached_property
    def busy_halves(self) -> tuple[frozenset[FrameKey], ...]:
        """By chunk, the halves with a wait in which anything runs, for any chunk."""
        return tuple(
            frozenset[FrameKey]().union(*(one_pass.busy_halves for one_pass in (self.forward(chunk), *self._backwards_of(chunk))))
            for chunk in range(len(self.chunks))
        )

    def _backwards_of(self, chunk: int) -> Iterator[Pass]:
        return (self.backward(chunk, phase) for phase in BACKWARD_PHASES)

    def _waits(self, passing: Passing, half: PlannedHalf, gathered: Window | None = None) -> Iterator[Wait]:
        """`gathered`: in a backward, the window after which the half's input is gathered, if it is."""
        once = passing == "bwd" and self.layout.sequence_parallel and half.gathers and not half.section.exchanges
        for ordinal in range(self.layout.waits(passing, half.layer, half.section)):
            over = once and half.section.collectives("bwd", True)[ordinal].carries == "input"
            yield Wait(WindowAddress(passing, half.layer, half.half, ordinal), gathered if over else None)

    def _planned(self, chunk: int, phase: Phase) -> Tasks:
        if (chunk, phase) not in self._known:
            self._known[chunk, phase] = _planned(self.chunks[chunk], phase, self.layout)
        return self._known[chunk, phase]

    @cached_property
    def _deferred(self) -> tuple[Tasks, ...]:
        """By chunk, its weight gradients in their planned waits."""
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


def _table(moments: Iterable[Moment], planned: Tasks, weight_gradients: Tasks) -> Tasks:
    """Tasks of both tables at these moments; in a wait recomputations come first."""
    merged = ((moment, (*planned.get(moment, ()), *weight_gradients.get(moment, ()))) for moment in moments)
    return {moment: tasks for moment, tasks in merged if tasks}


def _planned(halves: Sequence[PlannedHalf], phase: Phase, layout: Layout) -> Tasks:
    """Recomputations and gathers of one chunk's backwards in one phase."""
    tasks: dict[Moment, tuple[Task, ...]] = {}
    feeding = dict(_feeding(halves))
    for half in reversed(halves):
        if half.checkpoint:
            recomputations = () if half.feeds else _checkpointed(half, feeding.get(half.key, ()), layout)
        else:
            recomputations = _recomputed(half, phase) if half.recompute else ()
        for moment, task in recomputations:
            tasks[moment] = (*tasks.get(moment, ()), task)
    _begin_ahead(tasks, halves, layout)
    return tasks


def _recomputed(half: PlannedHalf, phase: Phase) -> Iterator[tuple[Moment, Task]]:
    """Yield the parts of a half's recomputation, and its gather."""
    since: str | None = None
    place = half.place(phase)
    gather = place.gather
    if gather == ON_DEMAND:
        yield Moment("demand", half.key), Task("recompute", half.key, gathered=ON_DEMAND)  # no window may communicate (rule R2)
        return
    if gather is not None:
        yield Moment("after", gather), Task("gather", half.key)
    for window, until in (*place.stretches, (ON_DEMAND, None)):
        moment = Moment("demand", half.key) if window == ON_DEMAND else Moment("in", window)
        yield moment, Task("recompute", half.key, until, since, gather)
        if until is None:
            return
        since, gather = until, None


def _checkpointed(half: PlannedHalf, before: Sequence[Task], layout: Layout) -> Iterator[tuple[Moment, Task]]:
    """Yield a checkpointed half's recomputation, after the tasks `before` that return its input. The part after its last
    communication may run in a wait."""
    entered, behind = Moment("enter", half.key), half.rest_after
    yield from ((entered, task) for task in before)
    if behind is None or not layout.waits("bwd", half.layer, half.section):
        yield entered, Task("recompute", half.key)
        return
    ((window, _),) = half.steady.stretches
    yield entered, Task("begin", half.key, behind)
    yield Moment("in", window), Task("recompute", half.key, since=behind)


def _feeding(halves: Sequence[PlannedHalf]) -> Iterator[tuple[FrameKey, tuple[Task, ...]]]:
    """By checkpointed half that keeps no input, the recomputations of the halves that return it."""
    before: tuple[Task, ...] = ()
    for half in halves:
        if half.feeds:
            before = (*before, Task("recompute", half.key))
        elif before:
            yield half.key, before
            before = ()


def _begin_ahead(tasks: dict[Moment, tuple[Task, ...]], halves: Sequence[PlannedHalf], layout: Layout) -> None:
    """Begin communication of layers where backward enters the attention half above them, or soon after: stock has nothing in
    flight there, and the MLP half above is freed. Does nothing at the top of a chunk."""
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
    """Moment in a half's backward at which a reduction of the same ranks begins: with sequence parallelism after the gather of
    the gradient, which would otherwise queue after it."""
    first, *_ = above.section.collectives("bwd", layout.sequence_parallel)
    gathers = first.carries == "gradient"
    return Moment("after", WindowAddress("bwd", *above.key, 0)) if gathers else Moment("enter", above.key)


def _deferred(halves: Sequence[PlannedHalf]) -> Tasks:
    """Weight gradients of a chunk by wait, in backward order."""
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
