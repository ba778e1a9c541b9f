"""Spans of a step on the device's clock, and seconds between pairs of events.

A span is a half, a recomputation, a delayed weight gradient, a window, a gather, a copy, or a wait for a copy. Times are those of
events on the current CUDA stream, on a CPU of the host's clock; only reading seconds waits for the device.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from megatron_lynx.runtime.device import Device, Event, device_for
from megatron_lynx.timeline import Span, SpanKind, name_of


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
