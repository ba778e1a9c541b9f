"""Queues matrix products on the device before each timed pass, so that the host issues the pass ahead of the device, under load.

    without      host    [ issue a ][ issue b ][ issue c ]                    b's event waits for the host: Python's time is
                 device             [a]        [b]        [c]                 included in a, b and c

    with         host    [ issue products, a, b, c ]
                 device        [ products ..................... ][a][b][c]    events measure device time only

Host time is measured separately (`testbed.host_time`) and is a lower bound of simulated passes. A GPU at its power limit lowers
its clock: in long steps, a layer of Llama 3 8B takes an H100 a sixth longer than in passes with pauses. So products also run for
a while before the first pass. On a CPU there are none: the host computes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_lynx.runtime.device import Device

LONGER = 2.0
"""Duration of the products, relative to the host time of the previous pass."""
SHORTEST_S, LONGEST_S = 0.01, 0.25
WARM_UP_S = 1.0
WIDTH = 8192
"""Matrix width: a product takes an A100 some 4 ms, an H100 1.5."""


class HeadStart:
    def __init__(self, device: Device, busy: Callable[[float], None] | None = None) -> None:
        """`busy`: gives the device work for about this many seconds; None on a CPU."""
        self.device = device
        self._busy = busy
        self._host_s = 0.0
        self._begin_s = 0.0

    def __enter__(self) -> HeadStart:
        if self._busy is not None:
            self._busy(min(max(LONGER * self._host_s, SHORTEST_S), LONGEST_S))
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._host_s = time.perf_counter() - self._begin_s


def head_start_on(device: Device) -> HeadStart:
    """Return the context for passes on this device, after warming it up."""
    if device.where.type != "cuda":
        return HeadStart(device)
    products = _Products(device)
    products.issue(WARM_UP_S)
    return HeadStart(device, products.issue)


class _Products:
    """Matrix products of a requested total duration."""

    def __init__(self, device: Device) -> None:
        self._factor = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device.where)
        self._product = torch.empty_like(self._factor)
        for _ in range(2):  # the first one selects its kernel
            begin = device.current.record(timed=True)
            self._multiply()
            end = device.current.record(timed=True)
            device.synchronize()
            self._one_s = end.seconds_since(begin)

    def issue(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds / self._one_s)):
            self._multiply()

    def _multiply(self) -> None:
        torch.mm(self._factor, self._factor, out=self._product)
