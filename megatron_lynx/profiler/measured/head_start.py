"""A head start for the host, under load: while it issues a pass that is timed, the device multiplies matrices before that pass.

    without      host    [ issue a ][ issue b ][ issue c ]                    b's mark comes when the host got to b: Python's
                 device             [a]        [b]        [c]                 time is in the seconds of a, b and c

    with it      host    [ issue products, a, b, c ]
                 device        [ products ..................... ][a][b][c]    the marks lie as far apart as the work takes

What Python takes is measured by itself (`testbed.host_time`), and a simulated pass is never shorter than it. And a GPU at its
limit of power lowers its clock: a layer of Llama 3 8B takes an H100 a sixth longer in a step of seconds than in passes between
which it rests. So the products come for a while before the first pass, and before each one. On a CPU the host computes, and there
are none.
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
"""How many times as long as the host took for the pass before."""
SHORTEST_S, LONGEST_S = 0.01, 0.25
WARM_UP_S = 1.0
WIDTH = 8192
"""Of the matrices: a product takes an A100 some 4 ms, an H100 1.5."""


class HeadStart:
    """Around everything that is issued for one pass on a device."""

    def __init__(self, device: Device, busy: Callable[[float], None] | None = None) -> None:
        """`busy`: gives the device work for about so many seconds; None where the host computes."""
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
    """Of passes on this device, which is under load from now on."""
    if device.where.type != "cuda":
        return HeadStart(device)
    products = _Products(device)
    products.issue(WARM_UP_S)
    return HeadStart(device, products.issue)


class _Products:
    """Multiplications that last as long as is asked for."""

    def __init__(self, device: Device) -> None:
        self._factor = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device.where)
        self._product = torch.empty_like(self._factor)
        for _ in range(2):  # the first one chooses its kernel
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
