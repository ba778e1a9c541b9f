"""What happened when, for timelines and for tests of order: one span per half, replay, weight
gradient that was deferred, window, gather, copy and wait for a copy.

Times are the device's own: on CUDA of events on the current stream, on a CPU of the host's clock. Nothing waits for the device
before somebody asks for seconds.

The replay clock adds up the seconds of replays, of steps in which it runs:

    a window opens ── [begin] replay [end] ── the wait      in a window: hidden, as far as the wait is longer
    backward asks  ── [begin] replay [end] ── backward      on demand: always exposed
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.runtime.device import Device, Event, device_for

SpanKind = Literal[
    "forward", "backward", "replay", "weight_gradient", "window", "gather", "recv", "offload", "reload", "copy_wait"
]


@dataclass(frozen=True)
class Span:
    """Something that took time. `window` is where a replay or a deferred weight gradient ran (`bwd.mlp.0@3`,
    `pipe.recv_backward`, `on_demand`, `flushed`), or the window itself. Seconds count from the trace's start, and `micro_batch`
    counts from 0 over the whole run of one rank."""

    kind: SpanKind
    layer: int | None
    half: str | None
    micro_batch: int | None
    window: str | None
    start_s: float
    end_s: float

    @property
    def name(self) -> str:
        where = f" {self.half}({self.layer})" if self.half else ""
        return f"{self.kind}{where}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name}


class Trace:
    """A list of spans that grows only while `enabled`."""

    def __init__(self, device: Device | None = None) -> None:
        self.enabled = False
        self._device = device or device_for(torch.device("cpu"))
        self._origin: Event | None = None
        self._spans: list[tuple[tuple[Any, ...], Event, Event]] = []

    def start(self) -> None:
        """Forget everything and record from here on."""
        self._spans.clear()
        self._origin = self._now()
        self.enabled = True

    def stop(self) -> list[Span]:
        """Record no more; the spans so far, by start. Waits for the device, whose clock they are read from."""
        self.enabled = False
        self._device.synchronize()
        spans = [Span(*(*what, self._seconds(start), self._seconds(end))) for what, start, end in self._spans]
        self._spans.clear()
        return sorted(spans, key=lambda span: (span.start_s, -span.end_s))

    @contextmanager
    def span(
        self,
        kind: SpanKind,
        layer: int | None = None,
        half: str | None = None,
        micro_batch: int | None = None,
        window: str | None = None,
    ) -> Iterator[None]:
        if not self.enabled:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self.add(kind, layer, half, micro_batch, window, start)

    def now(self) -> Event | None:
        """A moment, to give to `add` later (None while disabled)."""
        return self._now() if self.enabled else None

    def add(
        self,
        kind: SpanKind,
        layer: int | None,
        half: str | None,
        micro_batch: int | None,
        window: str | None,
        start: Event | None,
    ) -> None:
        """Record what began at `start` and ends now."""
        if self.enabled and start is not None:
            self._spans.append(((kind, layer, half, micro_batch, window), start, self._now()))

    def _now(self) -> Event:
        return self._device.current.record(timed=True)

    def _seconds(self, moment: Event) -> float:
        assert self._origin is not None, "the trace was never started"
        return moment.seconds_since(self._origin)


class ReplaySeconds(NamedTuple):
    """How long replays took in one step on one rank."""

    in_windows_s: float = 0.0
    on_demand_s: float = 0.0


class ReplayClock:
    """Times the replays of one engine. `runs`: whether they are timed from now on."""

    def __init__(self, device: Device) -> None:
        self.runs = False
        self._device = device
        self._timed: list[tuple[bool, Event, Event]] = []

    def begin(self) -> Event | None:
        """A replay begins (None while the clock does not run)."""
        return self._device.current.record(timed=True) if self.runs else None

    def end(self, window: str, begin: Event | None) -> None:
        """A replay ends that ran in `window`."""
        if begin is not None:
            self._timed.append((window == ON_DEMAND, begin, self._device.current.record(timed=True)))

    def take(self) -> ReplaySeconds:
        """Seconds of the replays since this was last asked. Waits until the device has passed them."""
        timed, self._timed = self._timed, []
        seconds = {True: 0.0, False: 0.0}
        for on_demand, begin, end in timed:
            end.synchronize()
            seconds[on_demand] += end.seconds_since(begin)
        return ReplaySeconds(in_windows_s=seconds[False], on_demand_s=seconds[True])
