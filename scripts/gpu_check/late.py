"""Collectives that are wrong until they are over, and take long: whoever uses a result before its wait uses NaN.

    issued       the collective works on a copy; its result's place is filled with NaN          [1]
                 on a stream of its own: the collective, then a delay                           [2]
    in between   what runs now is hidden behind it, if anything is
    waited for   compute comes behind that stream; the copy goes to the result's place          [3]

An all-reduce works in place, so that without this a use before the wait reads a number that is right, or nearly: bits show it
only by chance. Calls that wait at once are left as they are.

For a rank that is alone with a group of torch's "fake" backend, the other ranks are taken to hold what this one holds: an
all-reduce leaves its tensor, a gather repeats the slice, a reduce-scatter keeps the first part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lynx.runtime.device import Device, Event
from megatron_lynx.timeline import seconds_between
from scripts.gpu_check.overlap import Interval

Sent = tuple[Event, Callable[[], tuple[Event, float]]]
"""The beginning of a collective, and what makes compute come behind its end, and says when that was: so many seconds behind an
event."""


class Late:
    """The collectives of one group. Each takes `delay_s` and what it takes by itself."""

    def __init__(self, group: Any, device: Device, delay_s: float) -> None:
        self._group = group
        self._device = device
        self._delay_s = delay_s
        self._alone = dist.get_backend(group) == "fake"
        self._link = _CudaLink(delay_s) if device.where.type == "cuda" else _HostLink(delay_s)
        self._spans: list[tuple[Event, Event, float]] = []
        self._origin: Event | None = None

    def start(self) -> None:
        """Forget what was; times count from here on."""
        self._spans.clear()
        self._origin = self._device.record(timed=True)

    def intervals(self) -> list[Interval]:
        """When each collective was under way. Waits for the device."""
        self._device.synchronize()
        assert self._origin is not None, "nothing was started"
        origin = self._origin
        return [(seconds_between(origin, begin), seconds_between(origin, near) + more_s) for begin, near, more_s in self._spans]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """To be entered before a plan is installed: its hooks then call these."""
        from megatron.core.tensor_parallel import layers, mappings

        with ExitStack() as undo:
            for name in _RESULTS:
                undo.enter_context(patch.object(dist, name, self._late(name, getattr(dist, name))))
            for module in (mappings, layers):
                undo.enter_context(patch.object(module, "dist_all_gather_func", dist.all_gather_into_tensor))
                undo.enter_context(patch.object(module, "dist_reduce_scatter_func", dist.reduce_scatter_tensor))
            yield

    def _late(self, name: str, original: Any) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is not self._group:
                return original(*args, **kwargs)
            if not kwargs.get("async_op"):
                return _ALONE[name](*args) if self._alone else original(*args, **kwargs)
            place, *others = args
            result = place.clone() if name == "all_reduce" else torch.empty_like(place)
            place.fill_(float("nan") if place.is_floating_point() else 0)  # [1]

            def run(**more: Any) -> Any:
                return _ALONE[name](result, *others) if self._alone else original(result, *others, **{**kwargs, **more})

            return self._sent(run, place, result, [arg for arg in others if isinstance(arg, Tensor)])

        return collective

    def _sent(self, run: Callable[..., Any], place: Tensor, result: Tensor, sources: list[Tensor]) -> _Work:
        begin, finish = self._link.send(run, self._device, [result, *sources])  # [2]

        def wait() -> None:
            self._spans.append((begin, *finish()))
            place.copy_(result)  # [3]

        return _Work(wait)


class _Work:
    """What is waited for, once."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait: Callable[[], None] | None = wait

    def wait(self, *_: Any, **__: Any) -> bool:
        pending, self._wait = self._wait, None
        if pending is not None:
            pending()
        return True


class _CudaLink:
    """A side stream: the collective, and behind it a delay kernel of one thread.

    Nothing may follow that delay but an event without a time. With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware
    queue, and what has to wait for the delay at its head, another kernel of that stream or an event that takes the time, holds
    up every stream: compute would wait for the collective's end, whatever a plan does. (Measured on an H100:
    benchmarks/results/2026-11-22-hardware-queues.md.) When the delay ends is therefore not measured: it is `delay_s` behind
    the beginning at the earliest.
    """

    def __init__(self, delay_s: float) -> None:
        self._stream = torch.cuda.Stream()
        self._delay_s = delay_s
        self._cycles = int(delay_s * _cycles_per_s())

    def send(self, run: Callable[..., Any], device: Device, tensors: list[Tensor]) -> Sent:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            begin = device.record(timed=True)
            run(async_op=False)  # NCCL's stream comes behind this one, and this one behind NCCL's
            torch.cuda._sleep(self._cycles)
            over = device.record()
        for tensor in tensors:
            tensor.record_stream(self._stream)

        def finish() -> tuple[Event, float]:
            device.wait(over)
            return begin, self._delay_s

        return begin, finish


class _HostLink:
    """The host's clock, for ranks on a CPU: a wait lasts until the delay is over, too."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def send(self, run: Callable[..., Any], device: Device, tensors: list[Tensor]) -> Sent:
        begin = device.record(timed=True)
        over_s = time.monotonic() + self._delay_s
        work = run(async_op=True)

        def finish() -> tuple[Event, float]:
            if work is not None:
                work.wait()
            time.sleep(max(0.0, over_s - time.monotonic()))
            return device.record(timed=True), 0.0

        return begin, finish


def _cycles_per_s(cycles: int = 100_000_000) -> float:
    """How fast the delay kernel counts on this GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)  # not timed: the clock speeds up
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(cycles / (start.elapsed_time(end) / 1e3))


def _reduce(tensor: Tensor, *_: Any) -> None:
    """The sum is taken to be what is there: stock and a plan take it so alike."""


def _gather(output: Tensor, slice_: Tensor, *_: Any) -> None:
    output.view(-1, *slice_.shape).copy_(slice_.expand(output.size(0) // slice_.size(0), *slice_.shape))


def _scatter(output: Tensor, whole: Tensor, *_: Any) -> None:
    output.copy_(whole[: output.size(0)])


_ALONE: dict[str, Callable[..., None]] = {
    "all_reduce": _reduce,
    "all_gather_into_tensor": _gather,
    "reduce_scatter_tensor": _scatter,
}
_RESULTS = tuple(_ALONE)
