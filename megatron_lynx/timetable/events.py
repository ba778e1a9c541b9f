"""One pass of a stage as data: the halves that it goes through, and a table from moments to tasks.

    enter    mlp(4)             backward enters a half
    demand   mlp(4)             backward asks for the first tensor of it
    core     attention(4)       backward reaches its core attention
    in       bwd.mlp.0@4        a wait for communication: tasks run on the compute stream, and do not communicate (rule R2)
    after    bwd.mlp.0@4        that wait is over

    recompute         a half, or the part of it between two items
    begin             a checkpointed half up to an item, whose communication is left in flight
    gather            the input of a half, once for its recomputation and its backward (sequence parallelism)
    weight_gradient   the oldest one of a linear that is pending, of whichever micro-batch

A checkpoint communicates as its forward did, so it is recomputed where backward enters it, after the halves before it that return
its input. It may begin ahead; what it communicates is then in flight while the layer above runs backward:

    enter attention(5)          begin mlp(4) to its dispatch
    enter mlp(4)                recompute the rest

The rest of a half of experts, or of a dense half whose gradient is gathered, may run in the first wait of its own backward:

    enter mlp(4)                recompute attention(4); begin mlp(4) to its dispatch
    in    bwd.mlp.0@4           recompute the rest

An attention half may gather its input ahead, too, before it begins what it returns, which is reduced by the same ranks:

    after bwd.attention.0@5     begin attention(4) to its first linear, whose input is gathered
    core  attention(5)          begin the rest of it, up to its reduction
    enter mlp(4)                recompute the rest of attention(4); recompute mlp(4)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from megatron_lynx.anatomy import Half
from megatron_lynx.anatomy.address import FrameKey, Window, WindowAddress

At = Literal["enter", "demand", "core", "in", "after"]


class Moment(NamedTuple):
    """A point of a pass."""

    at: At
    place: FrameKey | Window
    """A window for `in` and `after`, else a half."""


class Linear(NamedTuple):
    """A linear of a layer, of experts the item that stands for theirs."""

    layer: int
    half: Half
    name: str


class Task(NamedTuple):
    """A piece of work that the plan has put at a moment."""

    do: Literal["recompute", "begin", "gather", "weight_gradient"]
    half: FrameKey
    item: str | None = None
    """To `recompute`: the item before which it stops; None: it runs as far as anything is wanted. To `begin`: the item whose
    communication is left in flight. Of a weight gradient: the linear."""
    since: str | None = None
    """The item at which the part before this one stopped. None: this is the first part."""
    gathered: Window | None = None
    """Of a first part whose input is gathered: after which window; `on_demand`: right before this."""

    @property
    def linear(self) -> Linear:
        """The linear whose weight gradient it is."""
        assert self.item is not None, "a weight gradient is of a linear"
        return Linear(*self.half, self.item)


class Wait(NamedTuple):
    """A wait for communication."""

    window: Window
    gathered: Window | None = None
    """Where it waits for an input that was gathered for a recomputation: after which window, or `on_demand`. It is then over
    before it begins, and no window."""

    @property
    def over(self) -> bool:
        return self.gathered is not None


class HalfPass(NamedTuple):
    """One half in one pass."""

    half: FrameKey
    waits: tuple[Wait, ...] = ()


Tasks = Mapping[Moment, tuple[Task, ...]]


@dataclass(frozen=True)
class Pass:
    """One pass of a chunk, or the receive of a gradient, which goes through no halves."""

    halves: tuple[HalfPass, ...] = ()
    """In the order in which it goes through them."""
    tasks: Tasks = field(default_factory=dict)

    def at(self, at: At, place: FrameKey | Window) -> tuple[Task, ...]:
        """The tasks of a moment, in order."""
        return self.tasks.get((at, place), ())  # type: ignore[call-overload, no-any-return]

    @cached_property
    def busy(self) -> frozenset[Window]:
        """Its windows in which, or after which, a task runs."""
        return frozenset(moment.place for moment in self.tasks if moment.at in ("in", "after"))  # type: ignore[misc]

    @cached_property
    def hides(self) -> bool:
        """Whether anything is recomputed in a window of it, or gathered after one."""
        places = (tasks for moment, tasks in self.tasks.items() if moment.at in ("in", "after"))
        return any(task.do in ("recompute", "gather") for tasks in places for task in tasks)

    @cached_property
    def busy_halves(self) -> frozenset[FrameKey]:
        """The halves that have such a window, or at which something begins."""
        waiting = (window.frame for window in self.busy if isinstance(window, WindowAddress))
        return frozenset((*waiting, *self._beginning("enter"), *self._beginning("core")))

    @cached_property
    def core_halves(self) -> frozenset[FrameKey]:
        """The halves at whose core attention something begins."""
        return self._beginning("core")

    def _beginning(self, at: At) -> frozenset[FrameKey]:
        begins = (moment for moment, tasks in self.tasks.items() if any(task.do == "begin" for task in tasks))
        return frozenset(moment.place for moment in begins if moment.at == at)  # type: ignore[misc]
