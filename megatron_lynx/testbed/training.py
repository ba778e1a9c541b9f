"""Runs forwards and backwards of a step with megatron-core as a launch script does. Gradients are left as backward makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_lynx.config.job import Job

SEED = 1234


@dataclass(frozen=True)
class MicroBatch:
    """Integer tensors of shape (b, s): batch by sequence, or the rank's part of it."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


ForwardStep = Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[torch.Tensor, Any]]


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return parameters by name, without wrappers' `module.`; with several chunks, prefixed with the chunk's number."""
    prefix = "" if len(chunks) == 1 else "{}."
    return {
        prefix.format(index) + name.replace("module.", ""): parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def gradients_of(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return copies."""
    found = {name: getattr(parameter, "main_grad", parameter.grad) for name, parameter in named_parameters(chunks).items()}
    return {name: gradient.detach().clone() for name, gradient in found.items() if gradient is not None}


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    job: Job,
    batches: Iterable[MicroBatch],
    forward_only: bool = False,
    forward_step_func: ForwardStep | None = None,
) -> list[torch.Tensor]:
    """Run all micro-batches of one step through Megatron's schedule; every chunk of an interleaved one reads the same batches."""
    batches = list(batches)
    results: list[torch.Tensor] = get_forward_backward_func()(
        forward_step_func=forward_step_func or forward_step,
        data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
        model=list(chunks),
        num_microbatches=job.microbatches,
        seq_length=job.model.seq,
        micro_batch_size=job.batch.micro,
        forward_only=forward_only,
    )
    return results


def forward_step(batches: Iterator[MicroBatch], model: Any, return_schedule_plan: bool = False) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through one chunk, as `pretrain_gpt.py` does; for the combined schedule return its plan of nodes."""
    batch = next(batches)
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(batch.tokens, batch.position_ids, None, labels=batch.labels), mean_loss


def mean_loss(losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a context-parallel rank's share: Megatron's schedules expect losses that sum over context-parallel ranks."""
    loss = losses_BS.float().mean() / parallel_state.get_context_parallel_world_size()
    return loss, loss.detach().clone()


def synthetic_batches(job: Job, step: int = 0) -> list[MicroBatch]:
    """Return this replica's micro-batches of one step: random tokens by step and position in the global batch."""
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
    """Return this rank's part of the sequences. Since 0.18 Megatron has a flag for hybrid context parallelism."""
    asked = "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters
    return get_batch_on_this_cp_rank(whole, **({"is_hybrid_cp": False} if asked else {}))  # type: ignore[no-any-return]
