"""Seconds of steps on the device's clock.

step k    [begin] ... schedule: [first] passes [last] ... update ... [end]
later     what the device has passed by then is added up; nothing waits for it
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from statistics import median
from typing import Any, NamedTuple

from megatron_lynx.runtime.device import Device, Event

REMEMBERED = 1000
"""Steps of which a usual one is told."""


class StepSeconds(NamedTuple):
    passes_s: float
    """Megatron's schedule, the reduction of gradients included."""
    step_s: float


class _Timed(NamedTuple):
    begin: Event
    passes: list[tuple[Event, Event]]
    end: Event


class StepClock:
    """Of one rank."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begin: Event | None = None
        self._passes: list[tuple[Event, Event]] = []
        self._pending: deque[_Timed] = deque()
        self._steps: deque[StepSeconds] = deque(maxlen=REMEMBERED)

    def begin(self) -> None:
        self._begin, self._passes = self._now(), []

    def around(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """The same schedule, timed. Megatron may call it more than once in a step."""

        @wraps(schedule)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            first = self._now()
            result = schedule(*args, **kwargs)
            self._passes.append((first, self._now()))
            return result

        return forward_backward

    def end(self, *, counts: bool = True) -> None:
        """The step is over. `counts`: it was a step like others."""
        if self._begin is not None and counts:
            self._pending.append(_Timed(self._begin, self._passes, self._now()))
        self._begin = None
        while self._pending and self._pending[0].end.done:
            self._steps.append(_seconds(self._pending.popleft()))

    def latest(self) -> StepSeconds | None:
        """Of the step that counted last; waits for the device."""
        while self._pending:
            self._pending[0].end.synchronize()
            self._steps.append(_seconds(self._pending.popleft()))
        return self._steps[-1] if self._steps else None

    def forget(self) -> None:
        """What a usual step takes is told of those to come."""
        self._pending.clear()
        self._steps.clear()

    def usual(self) -> StepSeconds | None:
        """The medians of all steps that counted; waits for the device."""
        if self.latest() is None:
            return None
        return StepSeconds(*(median(figures) for figures in zip(*self._steps, strict=True)))

    def known(self) -> StepSeconds | None:
        """Of the latest step that the device has passed; does not wait."""
        return self._steps[-1] if self._steps else None

    def _now(self) -> Event:
        return self._device.current.record(timed=True)


def _seconds(timed: _Timed) -> StepSeconds:
    return StepSeconds(sum(last.seconds_since(first) for first, last in timed.passes), timed.end.seconds_since(timed.begin))
