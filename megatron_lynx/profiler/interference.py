"""How much longer a replay takes while a collective is under way.

    alone     [ compute ]
    under     [ compute, slower ]
              [ collective ......... ] wait             interference = under / alone, the median over rounds

NCCL's kernels take multiprocessors and memory bandwidth, gloo's threads take the core. The collective is made long enough to
outlast the compute, so that all of it is disturbed. Ranks take the same rounds, each after a barrier; the slowest one counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_lynx.config.job import Job
from megatron_lynx.profiler.links import WARMUP, collective, slowest
from megatron_lynx.profiler.profile import LinkPoint

OUTLASTS = 3
"""How many times longer than the compute the collective is made."""


def replay_like(job: Job, device: torch.device) -> Callable[[], Any]:
    """What replays mostly are: the first GEMM of one rank's MLP, and a pass over what it made."""
    model = job.model
    dtype = torch.float32 if model.dtype == "fp32" else torch.bfloat16
    rows = torch.randn(model.seq * job.batch.micro, model.hidden, dtype=dtype, device=device)
    weight = torch.randn(model.hidden, model.fc1_width // job.parallel.tensor, dtype=dtype, device=device)
    return lambda: torch.nn.functional.gelu(rows @ weight)


def measure_interference(
    compute: Callable[[], Any], message: LinkPoint, group: ProcessGroup, device: torch.device, repetitions: int = 9
) -> float:
    """How many times longer it takes, at least 1. Every rank of the group calls it alike; `message` is a collective of this
    group and how long it takes."""
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
    """Seconds on the current stream alone: other streams, such as NCCL's, are not waited for."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000
