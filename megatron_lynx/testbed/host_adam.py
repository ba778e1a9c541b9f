"""Measures how fast this machine's CPUs step parameters as Megatron's optimizer on the host does: PyTorch's fused AdamW, fp32.

all ranks at once ──> together: what each has, while all share the machine's memory and cores
rank 0, others wait ──> alone

Each rank steps with the threads that it has, as in training: torchrun gives one to each, unless OMP_NUM_THREADS says more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lynx.config.host_time import HostAdam
from megatron_lynx.version import __version__

ELEMENTS = 2**23
"""With gradient and moments 128 MiB, more than caches hold."""
STEPS = 4


@dataclass(frozen=True)
class AdamFigures:
    """Of one rank: millions of parameters a second."""

    together: float
    alone: float | None
    """Rank 0's."""
    threads: int


def measure_adam(rank: int) -> AdamFigures:
    """Runs inside `RankPool`, on all ranks, which can talk."""
    optimizer = _optimizer()
    torch.distributed.barrier()
    together = _million_per_s(optimizer)
    torch.distributed.barrier()
    alone = _million_per_s(optimizer) if rank == 0 else None
    torch.distributed.barrier()
    return AdamFigures(together, alone, torch.get_num_threads())


def adam_of_ranks(figures: Sequence[AdamFigures]) -> HostAdam:
    """The slowest rank's, where all step; an update waits for it."""
    together, first = min(figure.together for figure in figures), figures[0]
    assert first.alone is not None, "rank 0 comes first"
    ranks = f"{len(figures)} ranks of {first.threads} threads"
    made_by = f"megatron-lynx {__version__}, torch {torch.__version__}, {ranks}, least of {STEPS} steps"
    return HostAdam(
        made_by=made_by,
        alone_million_per_s=round(max(first.alone, together), 1),
        together_million_per_s=round(together, 1),
    )


def _optimizer() -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS, device="cpu"))
    parameter.grad = torch.ones(ELEMENTS, device="cpu")
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    optimizer.step()  # makes its state
    return optimizer


def _million_per_s(optimizer: torch.optim.Optimizer) -> float:
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return ELEMENTS / 1e6 / min(seconds)
