"""Seconds that replays take, by where they run: in a window, or when backward asks. Only of steps in which the clock runs.

    a window opens ── [begin] replay [end] ── the wait      in a window: hidden, as far as the wait is longer
    backward asks  ── [begin] replay [end] ── backward      on demand: always exposed

Both ends are events on the compute stream, so that nothing waits for the device before somebody asks for the sum.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.runtime.device import Device, Event


class ReplaySeconds(NamedTuple):
    """Of one step on one rank."""

    in_windows_s: float = 0.0
    on_demand_s: float = 0.0


class ReplayClock:
    """Of one engine. `runs`: whether replays are timed from now on."""

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
        """Of the replays since this was last asked. Waits until the device has passed them."""
        timed, self._timed = self._timed, []
        seconds = {True: 0.0, False: 0.0}
        for on_demand, begin, end in timed:
            end.synchronize()
            seconds[on_demand] += end.seconds_since(begin)
        return ReplaySeconds(in_windows_s=seconds[False], on_demand_s=seconds[True])
