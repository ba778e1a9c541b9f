"""Seconds of steps, from events of the device, and peaks of device memory.

    step k  [begin] ... schedule: [first] passes [last] ... update ... [end]

CUDA    peaks of the caching allocator since the run began, and bytes used outside it (context, libraries, NCCL, other processes)
a CPU   allocated bytes of the first two steps, from PyTorch's profiler (`measure.memory`), or of all steps in a
        dispatch mode that counts them (`most_bytes`). Host memory for offloading is not counted
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from megatron_lynx.errors import LynxError
from megatron_lynx.measure.memory import CpuMeter, CpuTotal
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.trace import Clock

REMEMBERED = 1000


class StepSeconds(NamedTuple):
    passes_s: float
    """Megatron's schedule, including the reduction of gradients."""
    step_s: float


class StepClock:
    def __init__(self, device: Device) -> None:
        self._clock = Clock(device)
        self._passes_s = 0.0
        self._steps: deque[StepSeconds] = deque(maxlen=REMEMBERED)

    @contextmanager
    def step(self, arguments: dict[str, Any], *, counts: bool) -> Iterator[None]:
        """Time one step if it `counts`. `arguments`: those of Megatron's `train_step`."""
        self._clock.runs = counts
        arguments["forward_backward_func"] = self._around(arguments["forward_backward_func"])
        begin = self._clock.begin()
        yield
        self._clock.end("step", begin)
        self._take(exact=False)

    def _around(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(schedule)
        def forward_backward(*args: Any, **kwargs: Any) -> Any:
            begin = self._clock.begin()
            result = schedule(*args, **kwargs)
            self._clock.end("passes", begin)
            return result

        return forward_backward

    def _take(self, *, exact: bool) -> None:
        for what, seconds in self._clock.take(exact=exact):
            if what == "passes":
                self._passes_s += seconds
            else:
                self._steps.append(StepSeconds(self._passes_s, seconds))
                self._passes_s = 0.0

    def latest(self) -> StepSeconds | None:
        """Seconds of the latest step. Waits for the device."""
        self._take(exact=True)
        return self.known()

    def known(self) -> StepSeconds | None:
        """Seconds of the latest step that the device has finished. Does not wait."""
        return self._steps[-1] if self._steps else None

    def forget(self) -> None:
        """Leave the steps so far out of the medians."""
        self._take(exact=True)
        self._steps.clear()

    def usual(self) -> StepSeconds | None:
        """Medians of the steps. Waits for the device."""
        self._take(exact=True)
        return StepSeconds(*map(median, zip(*self._steps, strict=True))) if self._steps else None


class Peak(NamedTuple):
    allocated_bytes: int | None
    reserved_bytes: int | None
    outside_bytes: int | None = None
    """Used on the device outside PyTorch's allocator; None if unknown."""

    @property
    def slack_bytes(self) -> int | None:
        if self.allocated_bytes is None or self.reserved_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes


class DevicePeak:
    """Peaks of one rank. Must be created before the model: on a CPU, older tensors are not counted."""

    def __init__(self) -> None:
        where = torch.empty(0, device="cuda").device  # the CPU, if it stands in for CUDA in tests
        self._on_cuda = where.type == "cuda"
        self._total: CpuTotal | None = None
        if not self._on_cuda:
            with suppress(LynxError):  # this build of PyTorch hides it; the table says that memory is not measured
                self._total = CpuTotal()
        self._most: int | None = None

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count allocations of the block, on a CPU."""
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
        if (most_bytes := getattr(_get_current_dispatch_mode(), "most_bytes", None)) is not None:
            return Peak(most_bytes, None)
        return Peak(self._most, None)

    def with_outside(self) -> Peak:
        """`most` with `outside_bytes`, which is too slow to read in every step."""
        peak = self.most()
        if not self._on_cuda:
            return peak
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        return peak._replace(outside_bytes=all_bytes - free_bytes - torch.cuda.memory_reserved())
