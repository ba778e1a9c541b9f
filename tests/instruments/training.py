"""Training with Megatron's DistributedDataParallel and an optimizer, and evaluation, of the testbed's models."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config

from megatron_lynx.config.job import Job
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.testbed.training import MicroBatch, gradients_of, named_parameters, run_schedule


class Training:
    """A model in training.

    Args:
        optimizer: plain SGD (without reduction over replicas unless `ddp`), Megatron's Adam, or None.
            Megatron's needs `ddp`, and is distributed if the job says so.
        ddp: wrap the chunks in Megatron's DistributedDataParallel.
        buffers_of: one with `ddp` and the same parameters, whose wrappers' buffers and hooks serve both.
        overlap_grad_reduce: reduce buckets during backward (needs `ddp`).
        align_grad_reduce: with a pipeline, start the reductions of all stages together, as Megatron's pretraining.
        overlap_param_gather: gather parameters during forward (needs the distributed optimizer and `overlap_grad_reduce`).
        learning_rate: of either optimizer.
        settings: fields of Megatron's optimizer that replace those of `megatron_optimizer` (`optimizer="sgd"`, for example).
    """

    def __init__(
        self,
        job: Job,
        chunks: Sequence[torch.nn.Module],
        *,
        optimizer: Literal["sgd", "megatron"] | None = "sgd",
        ddp: bool = False,
        buffers_of: Training | None = None,
        overlap_grad_reduce: bool = False,
        align_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        learning_rate: float = 0.1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        overlaps = {"overlap_grad_reduce": overlap_grad_reduce, "overlap_param_gather": overlap_param_gather}
        self.job = job
        self.chunks = list(chunks)
        if ddp and buffers_of is not None:
            self.chunks = [around(*pair) for pair in zip(buffers_of.chunks, chunks, strict=True)]
        elif ddp:
            self.chunks = with_ddp(job, chunks, **overlaps)
        self.optimizer: Any = None
        config = get_model_config(self.chunks[0])
        config.finalize_model_grads_func = finalize_model_grads if ddp else finalize_without_ddp
        if ddp and overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = functions if len(functions) > 1 else functions[0]
            starts = [chunk.start_grad_sync for chunk in self.chunks] if align_grad_reduce else [None]
            config.grad_sync_func = starts if len(starts) > 1 else starts[0]
        if optimizer == "megatron":
            self.optimizer = megatron_optimizer(job, self.chunks, learning_rate, overlap_param_gather, settings)
            config.grad_scale_func = self.optimizer.scale_loss
        elif optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.parameters().values(), lr=learning_rate)

    def step(self, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
        """Run one optimizer step; return the losses of its micro-batches (empty except on the last stage). Gradients stay
        readable until the next one."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.zero_grad_buffer()
            chunk.zero_grad(set_to_none=True)
        losses = run_schedule(self.chunks, self.job, batches)
        if self.optimizer is not None:
            self.optimizer.step()
        return losses

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return named_parameters(self.chunks)

    def gradients(self) -> dict[str, torch.Tensor]:
        return gradients_of(self.chunks)

    def evaluate(self, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
        return evaluated(self.chunks, self.job, batches)


def finalize_without_ddp(chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **_: Any) -> None:
    """Reduce gradients as `finalize_model_grads`, which requires DDP: norms' over tensor-parallel ranks, which had slices of
    the sequence, and tied embeddings' over the first and last stage."""
    config = get_model_config(chunks[0])
    for name, parameter in named_parameters(chunks).items():
        if (gradient := parameter.grad) is None:
            continue
        per_head = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if per_head or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            dist.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        if getattr(parameter, "shared_embedding", False) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(gradient, group=parallel_state.get_embedding_group())


def evaluated(chunks: Sequence[torch.nn.Module], job: Job, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
    """Run forward only, without gradients and dropout; return losses as `Training.step`."""
    for chunk in chunks:
        chunk.eval()
    losses = run_schedule(chunks, job, batches, forward_only=True)
    for chunk in chunks:
        chunk.train()
    return losses


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


def megatron_optimizer(
    job: Job,
    chunks: Sequence[torch.nn.Module],
    learning_rate: float,
    overlap_param_gather: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Any:
    """Return Megatron's mixed-precision AdamW with gradient clipping, changed by `settings`, distributed if the job says so."""
    config: dict[str, Any] = {
        "optimizer": "adam",
        "lr": learning_rate,
        "clip_grad": 1.0,
        "bf16": job.model.dtype == "bf16",
        "params_dtype": get_model_config(chunks[0]).params_dtype,
        "use_distributed_optimizer": job.parallel.distributed_optimizer,
        "overlap_param_gather": overlap_param_gather,
        "reuse_grad_buf_for_mxfp8_param_ag": in_gradients(job),
    }
    if job.model.fp8_recipe not in (None, "nvfp4"):
        config["fp8_recipe"] = job.model.fp8_recipe
    return get_megatron_optimizer(OptimizerConfig(**{**config, **(settings or {})}), list(chunks))


def fp8_context(job: Job, layer: Any) -> AbstractContextManager[Any]:
    """Return Megatron's context in which a layer computes in the job's FP8 or FP4."""
    if job.model.fp8 is None:
        return nullcontext()
    bits = "fp4" if job.model.fp8.recipe == "nvfp4" else "fp8"
    context: AbstractContextManager[Any] = getattr(import_module(f"megatron.core.{bits}_utils"), f"get_{bits}_context")(
        layer.config
    )
    return context
