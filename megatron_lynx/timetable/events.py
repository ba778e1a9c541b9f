"""One pass of a stage as data: its halves, and a table from moments to tasks.

    enter    mlp(4)             backward enters a half
    demand   mlp(4)             backward unpacks the half's first tensor
    core     attention(4)       backward reaches its core attention
    in       bwd.mlp.0@4        a wait for communication: tasks run on the compute stream, and do not communicate (rule R2)
    after    bwd.mlp.0@4        that wait is over

    recompute         a half, or the part of it between two items
    begin             a checkpointed half up to an item, whose communication is left in flight
    gather            the input of a half, once for its recomputation and its backward (sequence parallelism)
    weight_gradient   the oldest pending one of a linear, of any micro-batch

A checkpoint communicates as its forward did, so it is recomputed where backward enters it, after the halves before it that return
its input. It may begin ahead; its communication is then in flight while the layer above runs backward:

    enter attention(5)          begin mlp(4) to its dispatch
    enter mlp(4)                recompute the rest

The rest of a half of experts, or of a dense half whose gradient is gathered, may run in the first wait of its own backward:

    enter mlp(4)                recompute attention(4); begin mlp(4) to its dispatch
    in    bwd.mlp.0@4           recompute the rest

An attention half may gather its input ahead, too, before it begins its output, which the same ranks reduce:

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
    flight. Weight gradient: the linear.
    """
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
    """A wait for communication."""

    window: Window
    gathered: Window | None = None
    """Window after which, or `on_demand` where, its input was already gathered for a recomputation. Such a wait takes no time and
    is not a window.
    """

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
    """One pass of a chunk, or the receive of a gradient, which has no halves."""

    halves: tuple[HalfPass, ...] = ()
    """In execution order."""
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
