"""Windows: what the plan runs while a collective or a receive is under way.

    issue ──> [ collective in flight ............................. ]
    wait()    │ [1] replays of this window, on the current stream   │ [2] the wait proper │ [3] gathers behind it

One mechanism for every kind: whatever returns a `Work` returns a `WindowedWork` instead. What runs is decided by the plan
alone (rule R1), equal on all ranks of the group, and holds no collective (rule R2).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_lynx.anatomy.address import BackwardPhase, FrameKey, Window


@dataclass(frozen=True)
class Agenda:
    """What the plan assigned in one chunk: frames to windows, by phase of the micro-batch whose backward they are for."""

    replays: Mapping[BackwardPhase, Mapping[Window, tuple[FrameKey, ...]]] = field(default_factory=dict)
    gathers: Mapping[Window, tuple[FrameKey, ...]] = field(default_factory=dict)
    """Frames whose input is gathered behind a window."""
    ahead_depth: int = 0
    whole: Container[int] = ()
    """Micro-batches of a step that keep everything, whatever the halves' policies say."""
    first_layer: int = 1
    """Of the chunk. A window of a forward is known by where its layer stands in its chunk: the forward may be another chunk's."""

    def replays_in(self, window: Window, phase: BackwardPhase) -> tuple[FrameKey, ...]:
        return self.replays.get(phase, {}).get(window, ())

    def gathers_behind(self, window: Window) -> tuple[FrameKey, ...]:
        return self.gathers.get(window, ())


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
