"""What the tests of `testbed.links` run on ranks."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .on_ranks import all_reduce_seconds

ELEMENTS = 250_000


def operations(rank: int) -> dict[str, tuple[Callable[..., Any], float]]:
    """Calls that take `async_op`, and the megabytes that cross the link each way."""
    import torch.distributed as dist

    whole, halves = torch.ones(ELEMENTS), [torch.ones(ELEMENTS // 2) for _ in range(2)]
    part, other = torch.ones(ELEMENTS // 2), torch.empty(ELEMENTS)

    def message(async_op: bool) -> Any:
        if rank == 0:
            return (dist.isend if async_op else dist.send)(whole, 1)
        return (dist.irecv if async_op else dist.recv)(other, 0)

    return {
        "all-reduce": (lambda async_op: dist.all_reduce(whole, async_op=async_op), 1.0),
        "reduce-scatter": (lambda async_op: dist.reduce_scatter_tensor(part, whole, async_op=async_op), 0.5),
        "all-gather": (lambda async_op: dist.all_gather_into_tensor(whole, part, async_op=async_op), 0.5),
        "all-gather of a list": (lambda async_op: dist.all_gather(halves, part, async_op=async_op), 0.5),
        "all-to-all": (lambda async_op: dist.all_to_all_single(other, whole, async_op=async_op), 0.5),
        "message": (message, 1.0),
        "broadcast": (lambda async_op: dist.broadcast(whole, 0, async_op=async_op), 1.0),
    }


def seconds_of_operations(rank: int) -> dict[tuple[str, bool], tuple[float, float]]:
    """By operation and whether the call itself waits: seconds from posting to the end of the wait, and megabytes."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    measured = {}
    for name, (operation, megabytes) in operations(rank).items():
        for blocking in (True, False):
            dist.barrier()
            start_s = time.perf_counter()
            work = operation(async_op=not blocking)
            if not blocking:
                work.wait()
            measured[name, blocking] = time.perf_counter() - start_s, megabytes
    dist.destroy_process_group()
    return measured


def processor_s_of_a_wait(rank: int) -> float:
    """Of the thread that waits for an all-reduce of a megabyte."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    work = dist.all_reduce(torch.ones(ELEMENTS), async_op=True)
    before_s = time.thread_time()
    work.wait()
    spent_s = time.thread_time() - before_s
    dist.destroy_process_group()
    return spent_s


def drop_capabilities() -> None:
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, none) == 0
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0


CAPABILITY_VERSION_3 = 0x20080522


def unprivileged_all_reduce_s(rank: int, elements: int) -> float:
    drop_capabilities()
    return all_reduce_seconds(rank, 4 * elements)
