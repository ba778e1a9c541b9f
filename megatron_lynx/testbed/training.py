"""Trains a model with megatron-core as a launch script does, in minimal form.

    initialise(job)                      the ranks' groups and seeds (groups)
    chunks = build_model(job)            (tiny_models)
    training = Training(job, chunks)     Megatron DDP or none; plain SGD, or Megatron's optimizer
    training.step(batches)               Megatron's schedule for this layout, reductions, optimizer; returns losses

Stock and planned runs use the same code: plans are unknown here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
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
"""Megatron's `forward_step_func`."""


class Training:
    """A model in training.

    Args:
        optimizer: plain SGD (without reduction over replicas unless `ddp`), Megatron's Adam, or None.
            Megatron's needs `ddp`, and is distributed if the job says so.
        ddp: wrap the chunks in Megatron's DistributedDataParallel.
        buffers_of: one with `ddp` and the same parameters, whose wrappers' buffers and hooks serve both.
        overlap_grad_reduce: reduce buckets during backward (needs `ddp`).
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
        overlap_param_gather: bool = False,
        learning_rate: float = 0.1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.job = job
        self.chunks = list(chunks)
        if ddp and buffers_of is not None:
            self.chunks = [around(*pair) for pair in zip(buffers_of.chunks, chunks, strict=True)]
        elif ddp:
            self.chunks = with_ddp(job, chunks, overlap_grad_reduce, overlap_param_gather)
        self.optimizer: Any = None
        config = get_model_config(self.chunks[0])
        config.finalize_model_grads_func = finalize_model_grads if ddp else finalize_without_ddp
        if ddp and overlap_grad_reduce:
            functions = [chunk.no_sync for chunk in self.chunks]
            config.no_sync_func = functions if len(functions) > 1 else functions[0]
        if optimizer == "megatron":
            self.optimizer = megatron_optimizer(job, self.chunks, learning_rate, overlap_param_gather, settings)
            config.grad_scale_func = self.optimizer.scale_loss
        elif optimizer == "sgd":
            self.optimizer = torch.optim.SGD(self.parameters().values(), lr=learning_rate)

    def step(self, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
        """Run one optimizer step; return the losses of its micro-batches (empty except on the last stage)."""
        return train_step(self.chunks, self.optimizer, self.job, batches)

    def evaluate(self, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
        """Run forward only, without gradients and dropout; return losses as `step`."""
        for chunk in self.chunks:
            chunk.eval()
        losses = run_schedule(self.chunks, self.job, batches, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return losses

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return named_parameters(self.chunks)

    def gradients(self) -> dict[str, torch.Tensor]:
        return gradients(self.chunks)


def with_ddp(
    job: Job, chunks: Sequence[torch.nn.Module], overlap_grad_reduce: bool, overlap_param_gather: bool
) -> list[torch.nn.Module]:
    """Wrap chunks in Megatron's DistributedDataParallel, with several buckets even for a tiny model."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=job.optimizer.gradients == "fp32",
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        use_distributed_optimizer=job.parallel.distributed_optimizer,
        num_distributed_optimizer_instances=job.parallel.optimizer_instances,
        fp8_param_gather=job.model.fp8_parameters,
        reuse_grad_buf_for_mxfp8_param_ag=in_gradients(job),
        bucket_size=20_000,
    )
    return [
        DistributedDataParallel(get_model_config(chunk), config, chunk, disable_bucketing=index > 0)  # as Megatron's pretraining
        for index, chunk in enumerate(chunks)
    ]


def in_gradients(job: Job) -> bool:
    """Return whether parameters are gathered in the gradient buffer."""
    recipe = job.model.fp8_recipe
    return recipe is not None and job.model.fp8_parameters and not STORED[recipe].held_in_buffer


def around(wrapper: torch.nn.Module, chunk: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a chunk's wrapper around another chunk with the same parameters.

    A second DistributedDataParallel would point `main_grad` to its own buffers, unknown to the first, and double the memory.
    """
    other = copy.copy(wrapper)
    other._modules = {"module": chunk}
    other.config = get_model_config(chunk)
    return other


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


def unwrapped(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    return [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Return parameters of all chunks by name, without wrappers' `module.`; with several chunks, prefixed with the chunk's
    number."""
    prefix = "" if len(chunks) == 1 else "{}."
    return {
        prefix.format(index) + name.replace("module.", ""): parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }


def gradients(chunks: Sequence[torch.nn.Module]) -> dict[str, torch.Tensor]:
    clones = {}
    for name, parameter in named_parameters(chunks).items():
        gradient = getattr(parameter, "main_grad", parameter.grad)
        if gradient is not None:
            clones[name] = gradient.detach().clone()
    return clones


def finalize_without_ddp(chunks: Sequence[torch.nn.Module], num_tokens: torch.Tensor | None = None, **_: Any) -> None:
    """Reduce plain `.grad` as Megatron's `finalize_model_grads`, which requires DDP.

    Sums norm gradients over tensor-parallel ranks (each had a slice of the sequence) and tied embeddings' over the first and last
    stage.
    """
    config = get_model_config(chunks[0])
    for name, parameter in named_parameters(chunks).items():
        if parameter.grad is None:
            continue
        per_head = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if per_head or (config.sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            dist.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
        if getattr(parameter, "shared_embedding", False) and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            dist.all_reduce(parameter.grad, group=parallel_state.get_embedding_group())


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
    """Run all micro-batches of one step through Megatron's schedule for this layout.

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
