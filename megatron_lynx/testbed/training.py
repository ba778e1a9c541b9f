"""Runs steps of a model with megatron-core as a launch script does, with Megatron's DDP or none, and without an optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config

from megatron_lynx.config.job import Job
from megatron_lynx.fp8_recipes import STORED

SEED = 1234


@dataclass(frozen=True)
class MicroBatch:
    """Integer tensors of shape (b, s): batch by sequence, or the rank's part of it."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor


ForwardStep = Callable[[Iterator[MicroBatch], torch.nn.Module], tuple[torch.Tensor, Any]]


class Training:
    """A model whose gradients are made and left: steps have no update.

    `ddp`: wrap the chunks in Megatron's DistributedDataParallel. `buffers_of`: one with `ddp` and the same parameters, whose
    wrappers' buffers and hooks serve both. `overlaps`: fields of DistributedDataParallelConfig besides `with_ddp`'s.
    """

    def __init__(
        self,
        job: Job,
        chunks: Sequence[torch.nn.Module],
        *,
        ddp: bool = False,
        buffers_of: Training | None = None,
        **overlaps: bool,
    ) -> None:
        self.job = job
        self.chunks = list(chunks)
        if ddp and buffers_of is not None:
            self.chunks = [around(*pair) for pair in zip(buffers_of.chunks, chunks, strict=True)]
        elif ddp:
            self.chunks = with_ddp(job, chunks, **overlaps)
        get_model_config(self.chunks[0]).finalize_model_grads_func = finalize_model_grads if ddp else finalize_without_ddp

    def step(self, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
        """Clear gradients and run the schedule; return the losses of its micro-batches (empty except on the last stage)."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.zero_grad_buffer()
            chunk.zero_grad(set_to_none=True)
        return run_schedule(self.chunks, self.job, batches)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return named_parameters(self.chunks)

    def gradients(self) -> dict[str, torch.Tensor]:
        found = {name: getattr(parameter, "main_grad", parameter.grad) for name, parameter in self.parameters().items()}
        return {name: gradient.detach().clone() for name, gradient in found.items() if gradient is not None}


def with_ddp(job: Job, chunks: Sequence[torch.nn.Module], **overlaps: bool) -> list[torch.nn.Module]:
    """Wrap chunks in Megatron's DistributedDataParallel, with several buckets even for a tiny model."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=job.optimizer.gradients == "fp32",
        use_distributed_optimizer=job.parallel.distributed_optimizer,
        num_distributed_optimizer_instances=job.parallel.optimizer_instances,
        fp8_param_gather=job.model.fp8_parameters,
        reuse_grad_buf_for_mxfp8_param_ag=in_gradients(job),
        bucket_size=20_000,
        **overlaps,
    )
    return [
        DistributedDataParallel(get_model_config(chunk), config, chunk, disable_bucketing=index > 0)  # as Megatron's pretraining
        for index, chunk in enumerate(chunks)
    ]


def in_gradients(job: Job) -> bool:
    recipe = job.model.fp8_recipe
    return recipe is not None and job.model.fp8_parameters and not STORED[recipe].held_in_buffer


def around(wrapper: torch.nn.Module, chunk: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a chunk's wrapper around another chunk with the same parameters, whose gradients it shares."""
    other = copy.copy(wrapper)
    other._modules = {"module": chunk}
    other.config = get_model_config(chunk)
    return other


def unwrapped(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return parameters by name, without wrappers' `module.`; with several chunks, prefixed with the chunk's number."""
    prefix = "" if len(chunks) == 1 else "{}."
    return {
        prefix.format(index) + name.replace("module.", ""): parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def finalize_without_ddp(chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **_: Any) -> None:
    """Reduce plain `.grad` as `finalize_model_grads`, which requires DDP: norms' over tensor-parallel ranks, which had slices of
    the sequence, and tied embeddings' over the first and last stage."""
    config = get_model_config(chunks[0])
    for name, parameter in named_parameters(chunks).items():
        if parameter.grad is None:
            continue
        per_head = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if per_head or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        if getattr(parameter, "shared_embedding", False) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(parameter.grad, group=parallel_state.get_embedding_group())


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
