"""A head start for the host: while it issues a pass that is timed, the device is kept busy with a delay in front of that pass.

    without      host    [ issue a ][ issue b ][ issue c ]                    b's mark comes when the host got to b: Python's
                 device             [a]        [b]        [c]                 time is in the seconds of a, b and c

    with it      host    [ issue delay a b c ]
                 device        [ delay ............ ][a][b][c]                the marks lie as far apart as the work takes

What Python takes is measured by itself (`testbed.host_time`), and a simulated pass is never shorter than it. On a CPU the host
computes, and there is no delay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_lynx.runtime.device import Device

LONGER = 2.0
"""How many times as long as the host took for the pass before."""
LONGEST_S = 0.25
CYCLES = 20_000_000
"""Of the delay that tells how fast the delay kernel counts: some ten milliseconds."""


class HeadStart:
    """Around everything that is issued for one pass. The first pass has none: how long it needs to be is not known yet."""

    def __init__(self, delay: Callable[[float], None] | None) -> None:
        """`delay`: keeps the device busy for so many seconds; None where the host computes."""
        self._delay = delay
        self._host_s = 0.0
        self._begin_s = 0.0

    def __enter__(self) -> HeadStart:
        if self._delay is not None and self._host_s:
            self._delay(min(LONGER * self._host_s, LONGEST_S))
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._host_s = time.perf_counter() - self._begin_s


def head_start_on(device: Device) -> HeadStart:
    """Of passes on this device."""
    if device.where.type != "cuda":
        return HeadStart(None)
    rate = cycles_per_s()
    return HeadStart(lambda seconds: torch.cuda._sleep(int(seconds * rate)))


def cycles_per_s() -> float:
    """How fast the delay kernel counts on the current GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(CYCLES)  # not timed: the clock speeds up
    start.record()
    torch.cuda._sleep(CYCLES)
    end.record()
    end.synchronize()
    return float(CYCLES / (start.elapsed_time(end) / 1e3))
