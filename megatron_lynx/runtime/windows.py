"""Windows: stretches in which compute would wait for communication, and the tasks that the plan has put into them.

    issue ──> [ collective in flight .......................... ]
    wait()    │ [1] tasks of this window, on the current stream  │ [2] the wait proper │ [3] tasks behind it

One mechanism serves every kind of wait: whatever returns a `Work` returns a `WindowedWork` instead. What runs is decided by the
plan alone (rule R1), is equal on all ranks of the group, and holds no collective (rule R2). What has to communicate, such as
gathering an input, runs behind the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron_lynx.anatomy.address import BackwardPhase, FrameKey, Window, WindowAddress
from megatron_lynx.runtime.policy import DeferralPolicy
from megatron_lynx.runtime.task import Task

Tasks = Mapping[Window, tuple[Task, ...]]


@dataclass(frozen=True)
class Windows:
    """What the plan assigned in one chunk."""

    during: Mapping[BackwardPhase, Tasks] = field(default_factory=dict)
    """Tasks that run before the wait proper, by phase of the micro-batch whose backward they are for."""
    behind: Mapping[BackwardPhase, Tasks] = field(default_factory=dict)
    """Tasks that run when the wait is over, by the same phase."""
    weight_gradients: Tasks = field(default_factory=dict)
    """Weight gradients that run in a wait if they are pending, in any phase and for any micro-batch."""
    deferral: DeferralPolicy = field(default_factory=DeferralPolicy)
    """What is deferred for them."""
    ahead_depth: int = 0
    """How many halves of a micro-batch may be regenerated before backward reaches them (rule R4)."""
    whole: Container[int] = ()
    """Micro-batches of a step that keep everything, whatever the halves' policies say."""
    first_layer: int = 1
    """The chunk's first layer. A window of a forward is known by where its layer stands in its chunk, because the forward may be
    another chunk's."""

    def tasks_during(self, window: Window, phase: BackwardPhase, running: Windows) -> tuple[Task, ...]:
        """`running`: the windows of the chunk whose pass waits, which may be another one where that pass is a forward."""
        tasks = self.during.get(phase)
        return tasks.get(self._own(window, running), ()) if tasks else ()

    def tasks_behind(self, window: Window, phase: BackwardPhase, running: Windows) -> tuple[Task, ...]:
        tasks = self.behind.get(phase)
        return tasks.get(self._own(window, running), ()) if tasks else ()

    def weight_gradients_in(self, running: Windows, end: int | None) -> dict[Window, tuple[Task, ...]]:
        """Those tasks by the windows of this chunk's backwards, and of forwards through the chunk `running`, whose layers come
        before the layer `end`."""
        place, found = running.first_layer - self.first_layer, {}
        for window, tasks in self.weight_gradients.items():
            if isinstance(window, WindowAddress) and window.passing == "fwd":
                window = window._replace(layer=window.layer + place)
                if end is not None and window.layer >= end:
                    continue  # that chunk has no such layer
            found[window] = tasks
        return found

    def serves(self, half: FrameKey, running: Windows) -> bool:
        """Whether a task of this chunk runs in a collective of `half`, which is one of the chunk `running`."""
        layer, name = half
        at_the_same_place = layer - running.first_layer + self.first_layer
        return ("bwd", layer, name) in self._busy or ("fwd", at_the_same_place, name) in self._busy

    @property
    def in_collectives(self) -> bool:
        """Whether any task runs in, or behind, a collective or an exchange."""
        return bool(self._busy)

    @cached_property
    def in_forwards(self) -> bool:
        """Whether any task runs in a collective of a forward."""
        return any(passing == "fwd" for passing, *_ in self._busy)

    @cached_property
    def _busy(self) -> frozenset[tuple[str, int, str]]:
        """Pass, layer and half of the collectives in which anything runs."""
        windows = {window for tasks in (*self.during.values(), *self.behind.values(), self.weight_gradients) for window in tasks}
        return frozenset((one.passing, *one.frame) for one in windows if isinstance(one, WindowAddress))

    def _own(self, window: Window, running: Windows) -> Window:
        """The window by which this chunk's plan names one of the running chunk's."""
        if isinstance(window, WindowAddress) and window.passing == "fwd" and running is not self:
            return window._replace(layer=window.layer - running.first_layer + self.first_layer)
        return window


class WindowedWork:
    """A `Work` whose first wait runs a window. Everything else is the work's own."""

    def __init__(self, work: Any, window: Callable[[Callable[[], Any]], Any]) -> None:
        self._work = work
        self._window: Callable[[Callable[[], Any]], Any] | None = window

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        window, self._window = self._window, None
        if window is None:
            return self._work.wait(*args, **kwargs)
        return window(lambda: self._work.wait(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
