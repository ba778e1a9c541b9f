"""One rank of a tensor-parallel group, alone on its device: every collective takes a link's time, and nothing is sent.

    compute stream   ──[GEMM]──┬──[replay, if a plan has one here]──┬── waits here if the link is slower
    link stream                └──[delay ............][copy]────────┘

The group is torch's "fake" one of the full size, so Megatron builds the rank's real shard and takes its real path, and a plan's
hooks sit where they always do. The other ranks are taken to hold what this one holds: an all-reduce leaves its tensor, a gather
repeats the slice, a reduce-scatter keeps the first part. Losses mean nothing, but every setting computes the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


class Link(Protocol):
    """Where messages of the group queue up."""

    def send(self, seconds: float, copy: Callable[[], object], *tensors: Tensor) -> Any:
        """A `Work` that is done `seconds` after all that was sent before, and after the tensors were computed."""


class DeviceLink:
    """A side stream of the GPU, kept busy by a delay kernel of one thread."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._cycles_per_s = _cycles_per_s()

    def send(self, seconds: float, copy: Callable[[], object], *tensors: Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
            copy()
            done = torch.cuda.Event()
            done.record()
        for tensor in tensors:
            tensor.record_stream(self._stream)
        return _Work(lambda: torch.cuda.current_stream().wait_event(done))


class HostLink:
    """A clock in place of a device's events, for a run without a GPU."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def send(self, seconds: float, copy: Callable[[], object], *tensors: Tensor) -> Any:
        copy()
        done = self._free_at = max(time.monotonic(), self._free_at) + seconds
        return _Work(lambda: time.sleep(max(0.0, done - time.monotonic())))


class _Work:
    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def wait(self, *_: Any, **__: Any) -> bool:
        self._wait()
        return True


def _cycles_per_s(cycles: int = 100_000_000) -> float:
    """How fast the delay kernel counts on this GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)  # not timed: the clock speeds up
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return float(cycles / (start.elapsed_time(end) / 1e3))


def join_alone(ranks: int) -> None:
    """Make this process rank 0 of a job of `ranks` whose other ranks do not exist."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 (makes the backend known)

    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())  # type: ignore[attr-defined]


@contextmanager
def emulated(group: Any, link: Link, bytes_per_s: float, latency_s: float) -> Iterator[None]:
    """Collectives of `group` take what rings would take on that link: t ranks send (t-1)/t of the whole, or twice that."""
    from megatron.core.tensor_parallel import layers, mappings

    ranks = group.size()

    def timed(send: Callable[..., tuple[Tensor, Callable[[], object], float]], original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") is not group:
                return original(*args, **kwargs)
            whole, copy, rounds = send(*args)
            seconds = latency_s + rounds * (ranks - 1) / ranks * whole.numel() * whole.element_size() / bytes_per_s
            work = link.send(seconds, copy, *(arg for arg in args if isinstance(arg, Tensor)))
            return work if kwargs.get("async_op") else (work.wait(), None)[1]

        return collective

    with ExitStack() as undo:
        for name, send in (("all_reduce", _reduce), ("all_gather_into_tensor", _gather), ("reduce_scatter_tensor", _scatter)):
            undo.enter_context(patch.object(dist, name, timed(send, getattr(dist, name))))
        for module in (mappings, layers):
            undo.enter_context(patch.object(module, "dist_all_gather_func", dist.all_gather_into_tensor))
            undo.enter_context(patch.object(module, "dist_reduce_scatter_func", dist.reduce_scatter_tensor))
        yield


def _reduce(tensor: Tensor, *_: Any) -> tuple[Tensor, Callable[[], object], float]:
    return tensor, lambda: None, 2.0


def _gather(output: Tensor, slice_: Tensor, *_: Any) -> tuple[Tensor, Callable[[], object], float]:
    return (
        output,
        lambda: output.view(-1, *slice_.shape).copy_(slice_.expand(output.size(0) // slice_.size(0), *slice_.shape)),
        1.0,
    )


def _scatter(output: Tensor, whole: Tensor, *_: Any) -> tuple[Tensor, Callable[[], object], float]:
    return whole, lambda: output.copy_(whole[: output.size(0)]), 1.0
