"""One step, as `pretrain_gpt.py` takes it: gradients cleared, all micro-batches through Megatron's own schedule, the update.

    train_step ──> run_schedule ──> Megatron's schedule for this layout ──> forward_step, once for each micro-batch and chunk

What is given as `forward_step_func` takes the place of `forward_step`, to count or to fail on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.batches import MicroBatch

ForwardStep = Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[torch.Tensor, Any]]
"""What Megatron calls its `forward_step_func`."""


def train_step(chunks: Sequence[torch.nn.Module], optimizer: Any, job: Job, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
    """Clear gradients, run the schedule, step. Gradients stay readable until the next step."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            chunk.zero_grad_buffer()
        chunk.zero_grad(set_to_none=True)
    losses = run_schedule(chunks, job, batches)
    if optimizer is not None:
        optimizer.step()
    return losses


def run_schedule(
    chunks: Sequence[torch.nn.Module],
    job: Job,
    batches: Iterable[MicroBatch],
    forward_only: bool = False,
    forward_step_func: ForwardStep | None = None,
) -> list[torch.Tensor]:
    """All micro-batches of one step through Megatron's own schedule for this layout; `forward_step` runs each of them.

    Every chunk of an interleaved schedule reads the same batches.
    """
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
    """One micro-batch through one chunk, as `pretrain_gpt.py` does it; for the combined schedule the nodes that it will run."""
    batch = next(batches)
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(batch.tokens, batch.position_ids, None, labels=batch.labels), mean_loss


def mean_loss(losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A context-parallel rank's share: Megatron's schedules expect what, added up over the ranks of a sequence, is its loss."""
    loss = losses_BS.float().mean() / parallel_state.get_context_parallel_world_size()
    return loss, loss.detach().clone()
