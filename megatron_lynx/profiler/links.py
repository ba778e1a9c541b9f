"""Times a job's messages between its ranks, and the slowdown of computation during a collective.

Each is the median of repeated rounds with a barrier, and the maximum over ranks. Sizes: the gathered tensor for all-gather and
reduce-scatter; bytes sent by one rank for p2p.

    alone     [ compute ]
    under     [ compute, slower ]
              [ collective, sized to outlast ] wait             interference = under / alone
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lynx.config.job import Job
from megatron_lynx.profiler.profile import LinkKind, LinkPoint

WARMUP = 2
"""Messages before the first timed one: connections are made on first use."""


def messages_of(job: Job) -> dict[LinkKind, int]:
    model, parallel = job.model, job.parallel
    whole = model.seq // parallel.context * job.batch.micro * model.hidden * model.element_bytes
    messages: dict[LinkKind, int] = {}
    if parallel.sequence_parallel:
        messages |= {"all_gather": whole, "reduce_scatter": whole}
    elif parallel.tensor > 1:
        messages["all_reduce"] = whole
    if parallel.pipeline > 1:
        messages["p2p"] = whole // parallel.tensor if parallel.sequence_parallel else whole
    return messages


def measure_links(
    kinds: Iterable[LinkKind], sizes_bytes: Sequence[int], group: ProcessGroup, device: torch.device, repetitions: int = 7
) -> tuple[LinkPoint, ...]:
    """Time messages of these kinds and sizes over `group`. Every rank of the group makes the same call and gets the same result.

    Sizes are rounded down to whole fp32 elements on every rank. `p2p` goes from each rank to the next one and needs two ranks.
    """
    points = []
    for kind in kinds:
        for size in sizes_bytes:
            send = _message(kind, size, group, device)
            points.append(
                LinkPoint(kind=kind, bytes=size, seconds=slowest(_median_seconds(send, group, repetitions), group, device))
            )
    return tuple(points)


def collective(kind: LinkKind, size_bytes: int, group: ProcessGroup, device: torch.device) -> Callable[[], Any]:
    ranks = dist.get_world_size(group)
    count = max(1, size_bytes // 4 // ranks)
    part, whole = torch.zeros(count, device=device), torch.zeros(count * ranks, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group, async_op=True)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)


def _message(kind: LinkKind, size_bytes: int, group: ProcessGroup, device: torch.device) -> Callable[[], Any]:
    if kind == "p2p":
        whole = torch.zeros(max(1, size_bytes // 4), device=device)
        return lambda: _pass_on(whole, group)
    start = collective(kind, size_bytes, group, device)
    return lambda: start().wait()


def _pass_on(whole: torch.Tensor, group: ProcessGroup) -> None:
    """Even ranks send to the next one, odd ranks receive: one message on each link, one way."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank % 2 == 0 and rank + 1 < ranks:
        dist.send(whole, dist.get_global_rank(group, rank + 1), group=group)
    elif rank % 2:
        dist.recv(whole, dist.get_global_rank(group, rank - 1), group=group)


def _median_seconds(send: Callable[[], Any], group: ProcessGroup, repetitions: int) -> float:
    seconds = []
    for repetition in range(WARMUP + repetitions):
        dist.barrier(group=group)
        start = time.perf_counter()
        send()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        if repetition >= WARMUP:
            seconds.append(time.perf_counter() - start)
    return median(seconds)


def slowest(seconds: float, group: ProcessGroup, device: torch.device) -> float:
    most = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return float(most.item())


OUTLASTS = 3
"""Duration of the collective, relative to the compute."""


def replay_like(job: Job, device: torch.device) -> Callable[[], Any]:
    """Return a workload typical of recomputation: the first GEMM of one rank's MLP, and the activation of its output."""
    model = job.model
    dtype = torch.float32 if model.dtype == "fp32" else torch.bfloat16
    rows = torch.randn(model.seq * job.batch.micro, model.hidden, dtype=dtype, device=device)
    weight = torch.randn(model.hidden, model.fc1_width // job.parallel.tensor, dtype=dtype, device=device)
    return lambda: torch.nn.functional.gelu(rows @ weight)


def measure_interference(
    compute: Callable[[], Any], message: LinkPoint, group: ProcessGroup, device: torch.device, repetitions: int = 9
) -> float:
    """Return the slowdown of `compute` during a collective, at least 1. Every rank of the group makes the same call. `message`: a
    collective of this group with its time."""
    timed = stream_seconds if device.type == "cuda" else wall_seconds
    alone_s = slowest(median(timed(compute) for _ in range(WARMUP + repetitions)), group, device)
    times = max(1, math.ceil(OUTLASTS * alone_s / message.seconds)) if message.seconds else 1
    start = collective(message.kind, times * message.bytes, group, device)
    ratios = []
    for _ in range(WARMUP + repetitions):
        dist.barrier(group=group)
        before_s = timed(compute)
        work = start()
        ratios.append(timed(compute) / before_s)
        work.wait()
    return max(1.0, median(ratios[WARMUP:]))


def wall_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def stream_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds on the current stream, without waiting for other streams such as NCCL's."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
