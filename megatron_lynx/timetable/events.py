"""A plan's treatment of each half, and one pass of a stage as data: its halves, and a table from moments to tasks.

    windows.mlp: {steady: bwd.mlp.0 until rotary then bwd.mlp.2, ...}  ──>  steady    Place(stretches, gather)
    weight_gradients: {linear_fc2: [bwd.attention.0, ...]}             ──>  deferred  linear_fc2: its windows

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

A checkpoint communicates as its forward did, so it is recomputed where backward enters it, after the halves before it that return
its input. It may begin ahead; its communication is then in flight while the layer above runs backward:

    enter attention(5)          begin mlp(4) to its dispatch
    enter mlp(4)                recompute the rest

The rest of a half of experts, or of a dense half whose gradient is gathered, may run in the first wait of its backward:

    enter mlp(4)                recompute attention(4); begin mlp(4) to its dispatch
    in    bwd.mlp.0@4           recompute the rest

An attention half may gather its input ahead, too, before it begins its output, which the same ranks reduce:

    after bwd.attention.0@5     begin attention(4) to its first linear, whose input is gathered
    core  attention(5)          begin the rest of it, up to its reduction
    enter mlp(4)                recompute the rest of attention(4); recompute mlp(4)
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy import Pass as Passing
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, SEND_BACKWARD, FrameKey, Window, WindowAddress
from megatron_lynx.schedule.schedule import Phase

At = Literal["enter", "demand", "core", "in", "after"]


class Moment(NamedTuple):
    at: At
    place: FrameKey | Window
    """A window for `in` and `after`, else a half."""


class Linear(NamedTuple):
    """A linear of a layer; for experts, the item that stands for theirs."""

    layer: int
    half: Half
    name: str


class Task(NamedTuple):
    """Work that the plan puts at a moment."""

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
        """The linear of a weight gradient."""
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
    """One pass of a chunk, or the receive of a gradient, which has no halves."""

    halves: tuple[HalfPass, ...] = ()
    tasks: Tasks = field(default_factory=dict)

    def at(self, at: At, place: FrameKey | Window) -> tuple[Task, ...]:
        """Tasks of a moment, in order."""
        return self.tasks.get((at, place), ())  # type: ignore[call-overload, no-any-return]

    @cached_property
    def busy(self) -> frozenset[Window]:
        """Windows with a task in or after them."""
        return frozenset(moment.place for moment in self.tasks if moment.at in ("in", "after"))  # type: ignore[misc]

    @cached_property
    def hides(self) -> bool:
        """Whether anything is recomputed in one of its windows, or gathered after one."""
        places = (tasks for moment, tasks in self.tasks.items() if moment.at in ("in", "after"))
        return any(task.do in ("recompute", "gather") for tasks in places for task in tasks)

    @cached_property
    def busy_halves(self) -> frozenset[FrameKey]:
        """Halves with such a window, or where something begins."""
        waiting = (window.frame for window in self.busy if isinstance(window, WindowAddress))
        return frozenset((*waiting, *self._beginning("enter"), *self._beginning("core")))

    @cached_property
    def core_halves(self) -> frozenset[FrameKey]:
        """Halves at whose core attention something begins."""
        return self._beginning("core")

    def _beginning(self, at: At) -> frozenset[FrameKey]:
        begins = (moment for moment, tasks in self.tasks.items() if any(task.do == "begin" for task in tasks))
        return frozenset(moment.place for moment in begins if moment.at == at)  # type: ignore[misc]


class Layout(NamedTuple):
    """Facts that decide the waits of a stage's halves."""

    collectives: bool = True
    """Whether there are several tensor-parallel ranks."""
    sequence_parallel: bool = False
    exchanging: Container[int] = ()
    """Layers whose expert exchanges are windows."""

    def waits(self, passing: Passing, layer: int, section: Section) -> int:
        """Number of waits of a half in one pass. Waits inside CUDA graphs cannot be used."""
        if section.captured:
            return 0
        if section.exchanges:
            return len(section.exchanges_of[passing]) if layer in self.exchanging else 0
        return len(section.collectives(passing, self.sequence_parallel)) if self.collectives else 0


class Place(NamedTuple):
    """Where a half is recomputed in one phase."""

    stretches: tuple[tuple[Window, str | None], ...] = ((ON_DEMAND, None),)
    """Windows, each with the item before which the recomputation stops there; None: it does not stop."""
    gather: Window | None = None
    """Window after which its input is gathered; None: it is not gathered."""


ON_DEMAND_PLACE = Place()


def ahead_to(section: Section, *, experts: bool, feeds: bool) -> str | None:
    """Return the item up to which a checkpointed half is recomputed during the backward of the layer above, if its layer begins
    ahead.

    `experts`: whether the layer has experts; then its dispatch is in flight meanwhile, else the reduction of its attention
    output. `feeds`: whether the next half's recomputation needs the half's output; an attention half without that begins nothing
    ahead.
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
    """One half of one layer under a plan."""

    layer: int
    section: Section
    recompute: Collection[str] = ()
    """Recomputed items, in forward order."""
    steady: Place = ON_DEMAND_PLACE
    cooldown: Place = ON_DEMAND_PLACE
    deferred: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """By linear in backward order, the waits of its delayed weight gradient: each takes the oldest pending one."""
    pieces: Mapping[str, int] = field(default_factory=dict)
    """By linear whose delayed weight gradient is cut, the number of its pieces: each wait takes the oldest pending piece."""
    checkpoint: bool = False
    """Whether it keeps at most its input: all of `recompute` is recomputed on demand, including communication. If its place is
    the first wait of its own backward, the part after its last communication runs there."""
    fed_behind: int = 0
    """Number of halves after this checkpointed one that keep no input, and get it from this one's recomputation."""
    ahead_to: str | None = None
    """Item up to which this checkpointed half is recomputed when backward enters the attention half of the layer above; the
    item's communication is in flight meanwhile. The half's last item: all of it has run. None: it begins when backward enters it.
    """
    gathers_ahead: bool = False
    """Whether its input is gathered ahead, before that."""

    @cached_property
    def half(self) -> Half:
        return self.section.half

    def delayed(self, *, drains: bool) -> frozenset[str]:
        """Linears that delay their weight gradients in one backward. `drains`: it is in cool-down, or its chunk's last: only then
        does a later stage's gradient reach the stage before sooner than it is needed there."""
        return frozenset(linear for linear, waits in self.deferred.items() if drains or waits != (SEND_BACKWARD,))

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
        return self.section.last_communicating if self.checkpoint and self.steady != ON_DEMAND_PLACE else None

    def place(self, phase: Phase) -> Place:
        return self.cooldown if phase == "cooldown" else self.steady

    @property
    def gathers(self) -> bool:
        """Whether the input of its recomputation is gathered once, so that backward need not gather it again. A checkpoint
        gathers it as a forward does, into a shared buffer: kept, it would be the checkpoint's largest block."""
        return self.section.column_parallel in self.recompute and not self.checkpoint

    @cached_property
    def ahead(self) -> int:
        """Number of halves before its own backward at which its recomputation or gather may begin: at least 1, and more if halves
        after it begin with its output. The receive of a gradient does not count: no recomputation of a micro-batch runs between
        its forward and its backward."""
        place = _place_in_stage(self.key)
        window_frames = [at.frame for at in self._windows() if isinstance(at, WindowAddress)]
        if self.ahead_to is not None:
            window_frames.append((self.layer + 1, HALVES[0]))
        return max((_place_in_stage(frame) + 1 - place for frame in window_frames), default=1 + self.fed_behind)

    @property
    def begins_early(self) -> bool:
        """Whether any of its recomputation runs before its own backward begins: in the receive of a gradient."""
        return RECV_BACKWARD in self._windows()

    def _windows(self) -> Iterator[Window | None]:
        """Windows in which it is recomputed, or after which its input is gathered."""
        for place in (self.steady, self.cooldown):
            yield from (window for window, _ in place.stretches)
            yield place.gather


def _place_in_stage(key: FrameKey) -> int:
    layer, half = key
    return len(HALVES) * layer + HALVES.index(half)
