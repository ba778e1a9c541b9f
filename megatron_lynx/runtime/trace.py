"""What happened when: one event per half, replay, window, gather, copy (to the host or back) and wait of compute for a copy,
for timelines and for tests of order.

On CUDA the times are those of the device (events recorded on the current stream); elsewhere of the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Kind = Literal["forward", "backward", "replay", "window", "gather", "recv", "offload", "reload", "copy_wait"]


@dataclass(frozen=True)
class Event:
    """`window` is where a replay ran (`bwd.mlp.0@3`, `pipe.recv_backward`, `on_demand`), or the window itself. Seconds from the
    trace's start. `micro_batch` counts from 0 over the whole run of one rank."""

    kind: Kind
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
    """A list of events that grows only while `enabled`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.enabled = False
        self._on_cuda = device is not None and device.type == "cuda"
        self._origin: Any = None
        self._spans: list[tuple[tuple[Any, ...], Any, Any]] = []

    def start(self) -> None:
        """Forget everything and record from here on."""
        self._spans.clear()
        self._origin = self._now()
        self.enabled = True

    def stop(self) -> list[Event]:
        """Record no more; the events so far, by start. Waits for the device, whose clock they are read from."""
        self.enabled = False
        if self._on_cuda:
            torch.cuda.synchronize()
        events = [Event(*(*what, self._seconds(start), self._seconds(end))) for what, start, end in self._spans]
        self._spans.clear()
        return sorted(events, key=lambda event: (event.start_s, -event.end_s))

    @contextmanager
    def span(
        self,
        kind: Kind,
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

    def now(self) -> Any:
        """A moment, to give to `add` later (None while disabled)."""
        return self._now() if self.enabled else None

    def add(
        self, kind: Kind, layer: int | None, half: str | None, micro_batch: int | None, window: str | None, start: Any
    ) -> None:
        """Record what began at `start` and ends now."""
        if self.enabled and start is not None:
            self._spans.append(((kind, layer, half, micro_batch, window), start, self._now()))

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, moment: Any) -> float:
        return float(self._origin.elapsed_time(moment) / 1e3 if self._on_cuda else moment - self._origin)
