"""The most that a rank's device held.

    CUDA    the caching allocator's own figures, since the run began: allocated, and reserved. When it is asked for: what the
            driver says is used beside the allocator (context, libraries, NCCL; other processes, too)
    a CPU   counted in the first two steps, with PyTorch's profiler (`measure.cpu_memory`): allocated. Nothing is reserved.
            Where a limit of memory is enforced (`MemoryLimit`), it counts all the time, behind operators only

On a CPU what lies on the host for offloading is mapped, not allocated, and does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron_lynx.errors import LynxError
from megatron_lynx.measure.cpu_memory import CpuMeter
from megatron_lynx.measure.cpu_total import CpuTotal, MemoryLimit


class Peak(NamedTuple):
    allocated_bytes: int | None
    reserved_bytes: int | None
    outside_bytes: int | None = None
    """Used on the device, and not by PyTorch's allocator. None: not asked, or no such device."""


class DevicePeak:
    """Of one rank. To be made before the model is built: on a CPU nothing older is counted."""

    def __init__(self) -> None:
        where = torch.empty(0, device="cuda").device  # the CPU, where that stands in
        self._on_cuda = where.type == "cuda"
        self._total = None if self._on_cuda else _cpu_total()
        self._most: int | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """What runs inside is counted, where that costs something."""
        busy = torch.autograd._profiler_enabled() or _get_current_dispatch_mode() is not None  # type: ignore[attr-defined]
        if self._total is None or busy:
            yield
            return
        level = self._total.bytes
        with CpuMeter() as meter:
            yield
        self._most = max(self._most or 0, level + meter.use.peak_bytes)

    def most(self) -> Peak:
        if self._on_cuda:
            return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        if isinstance(mode := _get_current_dispatch_mode(), MemoryLimit):
            return Peak(mode.most_bytes, None)
        return Peak(self._most, None)

    def with_outside(self) -> Peak:
        """The same, with what is used outside of the allocator. It asks the driver, so not in every step."""
        peak = self.most()
        if not self._on_cuda:
            return peak
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        return peak._replace(outside_bytes=all_bytes - free_bytes - torch.cuda.memory_reserved())


def _cpu_total() -> CpuTotal | None:
    try:
        return CpuTotal()
    except LynxError:  # this build of PyTorch does not tell: then no memory is measured, and the table says so
        return None
