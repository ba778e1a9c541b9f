"""Activation bytes of a step, counted the same way for every setting.

    with activation_meter(device) as meter:       level at entry = 0: weights, gradients and optimizer do not count
        forward();  meter.mark("after forward")   what is live now, above the level at entry
        backward()
    meter.use.peak_bytes                          the most that was live at any moment, above the level at entry

CUDA: the caching allocator's own statistics (blocks, rounded to 512 bytes). CPU: `cpu_memory` (exact). Either needs a step of
its own: count in a step that is not timed, after a warm-up, or the first use of lazily allocated buffers counts as activations.
`count_step` also keeps gradients out of it: a step that frees the last step's would seem to hold less than it does, and one
that allocates its own would seem to hold more from its second micro-batch on.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, final

import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Mark:
    """What was live at one moment, above the level at entry (negative: more was freed than allocated)."""

    name: str
    bytes: int


@dataclass(frozen=True)
class MemoryUse:
    """What one counted step used, in bytes above the level at entry."""

    peak_bytes: int
    """The most that was live at once (0 if the level at entry was never exceeded)."""
    marks: tuple[Mark, ...]
    """The marks, in the order in which they were made."""
    left_bytes: int
    """What the step left behind when the meter was closed."""
    peaks: tuple[Mark, ...] = field(default=(), compare=False)
    """For each mark the most that was live from then until the next one, or until the meter was closed."""

    @property
    def resident_bytes(self) -> int:
        """The largest mark: what a step holds between its forward and backward passes (0 without marks)."""
        return max((mark.bytes for mark in self.marks), default=0)

    def at(self, name: str) -> int:
        """Bytes at the first mark of that name; KeyError if there is none."""
        for mark in self.marks:
            if mark.name == name:
                return mark.bytes
        raise KeyError(name)


class ActivationMeter(ABC):
    """Counts what is allocated inside a `with` block; `use` exists once the block was left without an exception."""

    use: MemoryUse

    @abstractmethod
    def __enter__(self) -> ActivationMeter: ...

    @abstractmethod
    def mark(self, name: str) -> None:
        """Remember what is live now. Costs one tiny allocation at most, which is not counted."""

    @abstractmethod
    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None: ...


def activation_meter(device: torch.device | str) -> ActivationMeter:
    """The meter for a device. ValueError for devices other than CPU and CUDA."""
    device = torch.device(device)
    if device.type == "cuda":
        return CudaMeter(device)
    if device.type == "cpu":
        from megatron_lynx.measure.cpu_memory import CpuMeter

        return CpuMeter()
    raise ValueError(f"activation bytes can be counted on cpu and cuda, not on {device.type}")


def count_step(
    step: Callable[[ActivationMeter], object], device: torch.device | str, parameters: Iterable[torch.nn.Parameter] = ()
) -> MemoryUse:
    """What `step(meter)` uses. `step` runs forward and backward passes; it neither clears gradients nor steps an optimizer.

    Gradients of `parameters` are set to zeros first, so that they count neither as resident nor in the peak, whatever ran before.
    Give none where gradients live in buffers, as with Megatron's DDP. Garbage is collected first.
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    with activation_meter(device) as meter:
        step(meter)
    return meter.use


def marked(function: Callable[P, R], meter: ActivationMeter, name: str) -> Callable[P, R]:
    """`function`, with a mark each time it returns: hand it to Megatron's schedule in place of its `forward_step_func`."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        meter.mark(name)
        return result

    return call


@final
class CudaMeter(ActivationMeter):
    """Reads the caching allocator's statistics, which are kept on the host: nothing is synchronised. Resets the device's peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> CudaMeter:
        self._marks: list[Mark] = []
        self._peaks: list[int] = []
        torch.cuda.reset_peak_memory_stats(self._device)
        self._level = torch.cuda.memory_allocated(self._device)
        return self

    def mark(self, name: str) -> None:
        self._peaks.append(self._peak())
        self._marks.append(Mark(name, torch.cuda.memory_allocated(self._device) - self._level))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self._peaks.append(self._peak())
            left, marks = torch.cuda.memory_allocated(self._device) - self._level, tuple(self._marks)
            peaks = tuple(Mark(mark.name, peak) for mark, peak in zip(marks, self._peaks[1:], strict=True))
            self.use = MemoryUse(max(self._peaks), marks, left, peaks)

    def _peak(self) -> int:
        """The most since this was last asked."""
        peak = torch.cuda.max_memory_allocated(self._device) - self._level
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak
