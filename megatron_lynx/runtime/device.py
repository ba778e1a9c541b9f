"""Streams and events of a device, by which the runtime orders copies and compute, and spans and seconds between events.

A CPU's stream is the calling thread, its work has finished when the call returns, and its clock is the host's. `cuda` derives
those of a GPU; `tests/instruments/streams` a CPU whose copies run in threads, as late as they may.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.timeline import Span, SpanKind, name_of

Work = Callable[[], object]


class Event:
    """A point in a stream, reached when all work issued to the stream before it has finished."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    @property
    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait for it on the host."""

    def seconds_since(self, begin: Event) -> float:
        """Return the seconds on the device's clock. Both events must be reached, and recorded as timed."""
        return self._at_s - begin._at_s


class Stream:
    """Runs its work in order, in parallel with other streams."""

    def run(self, work: Work) -> None:
        """Call `work`, which issues to this stream. Errors of `work` are raised here."""
        work()

    def wait(self, event: Event) -> None:
        """Start work issued from now on after the event."""

    def record(self, *, timed: bool = False) -> Event:
        """Return the point after the work issued so far. `timed`: needed for `seconds_since`."""
        return Event()


class Device:
    """One device that computes, and the memory of its host."""

    def __init__(self, where: torch.device) -> None:
        self.where = where

    @property
    def current(self) -> Stream:
        """The stream on which the calling thread computes. Inside `Stream.run` it is that stream."""
        return CALLING_THREAD

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, which no other library uses."""
        return Stream()

    def synchronize(self) -> None:
        """Wait on the host until every stream has finished the work issued so far."""

    def hold(self, held: object, until: Event) -> None:
        """Keep a reference to an object until the event is reached."""

    def random_states(self) -> tuple[Tensor, ...]:
        """Return states of the default generators of code on this device, which later draws do not change."""
        return (torch.get_rng_state(),)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(*states)

    def lock(self, memory: Tensor) -> None:
        """Page-lock host memory for asynchronous copies. Raises `RuntimeError` if that fails."""

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock` when the copies issued so far have finished. Destructors call it: it never waits."""


CALLING_THREAD = Stream()


def device_for(where: torch.device) -> Device:
    """Return the device of tensors created on `where`, the same object each time."""
    return _made(torch.empty(0, device=where).device)


def present_device() -> Device:
    """Return the current CUDA device if CUDA is in use, else the CPU."""
    return device_for(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@cache
def _made(where: torch.device) -> Device:
    if where.type == "cuda":
        from megatron_lynx.runtime.cuda import CudaDevice

        return CudaDevice(where)
    return Device(where)


class Trace:
    """Spans recorded while `enabled`."""

    def __init__(self, device: Device | None = None) -> None:
        self.enabled = False
        self._device = device or device_for(torch.device("cpu"))
        self._origin: Event | None = None
        self._spans: list[tuple[SpanKind, tuple[Any, ...], Event, Event]] = []

    def start(self) -> None:
        self._spans.clear()
        self.enabled, self._origin = True, self._device.current.record(timed=True)

    def stop(self) -> list[Span]:
        """Return the spans since `start`, sorted by begin; waits for the device. Empty if it was never started."""
        if self._origin is None:
            return []
        self.enabled = False
        self._device.synchronize()
        since = self._origin
        spans = [Span(kind, at.seconds_since(since), end.seconds_since(since), *of) for kind, of, at, end in self._spans]
        self._spans.clear()
        return sorted(spans, key=lambda span: (span.start_s, -span.end_s))

    def now(self) -> Event | None:
        """Return the begin of a span, for `add` (None while disabled)."""
        return self._device.current.record(timed=True) if self.enabled else None

    def add(
        self,
        kind: SpanKind,
        begin: Event | None,
        layer: int | None = None,
        half: str | None = None,
        micro_batch: int | None = None,
        window: str | None = None,
    ) -> None:
        """End a span now."""
        if self.enabled and begin is not None:
            of = (layer, half, micro_batch, window, name_of(kind, layer, half, window))
            self._spans.append((kind, of, begin, self._device.current.record(timed=True)))


class Clock:
    """Seconds between pairs of events on the current stream. `runs`: whether pairs are recorded."""

    def __init__(self, device: Device, *, runs: bool = False) -> None:
        self.runs = runs
        self._device = device
        self._timed: deque[tuple[str, Event, Event]] = deque()

    def begin(self) -> Event | None:
        """Return the first event of a pair (None while the clock does not run)."""
        return self._device.current.record(timed=True) if self.runs else None

    def end(self, what: str, begin: Event | None) -> None:
        if begin is not None:
            self._timed.append((what, begin, self._device.current.record(timed=True)))

    def take(self, *, exact: bool = True) -> list[tuple[str, float]]:
        """Return (label, seconds) since the last call. `exact` waits for the device; otherwise unreached pairs stay."""
        seconds = []
        while self._timed and (exact or self._timed[0][2].done):
            what, begin, end = self._timed.popleft()
            end.synchronize()
            seconds.append((what, end.seconds_since(begin)))
        return seconds
