"""Micro-batches of random tokens, which depend on the step and the place in the global batch, not on the layout.

A context-parallel rank has its slices of each.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_lynx.config.job import Job

SEED = 1234


@dataclass(frozen=True)
class MicroBatch:
    """Integer tensors of shape (b, s): batch by sequence, or the rank's rows of it."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


def synthetic_batches(job: Job, step: int = 0) -> list[MicroBatch]:
    """This replica's micro-batches of one step: random tokens that depend on step and place in the global batch."""
    shape = (job.batch.micro, job.model.seq + 1)
    replica, device = parallel_state.get_data_parallel_rank(), torch.cuda.current_device()
    positions = torch.arange(job.model.seq, device=device).expand(job.batch.micro, -1)
    batches = []
    for index in range(job.microbatches):
        place = index * job.replicas + replica
        generator = torch.Generator().manual_seed(((SEED * 1_000 + step) * 1_000) + place)
        text = torch.randint(job.model.vocab, shape, generator=generator).to(device)
        whole = {"tokens": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous(), "position_ids": positions}
        batches.append(MicroBatch(**(_cut(whole) if job.parallel.context > 1 else whole)))
    return batches


def _cut(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of the sequences. Since 0.18 Megatron asks whether sizes of parts change with the data."""
    asked = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    return get_batch_on_this_cp_rank(whole, **({"is_hybrid_cp": False} if asked else {}))  # type: ignore[no-any-return]
