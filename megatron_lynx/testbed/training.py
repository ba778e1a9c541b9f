"""A model being trained: what a launch script does around megatron-core, and no more.

    initialise(job)                      the ranks' groups and seeds (groups)
    chunks = build_model(job)            (tiny_models)
    training = Training(job, chunks)     Megatron DDP or none; plain SGD, or Megatron's optimizer
    training.step(batches)               Megatron's own schedule for this layout, reductions, optimizer; losses back (step)

It knows nothing of plans: stock runs and planned runs go through the same lines.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config

from megatron_lynx.config.job import Job
from megatron_lynx.fp8_recipes import STORED
from megatron_lynx.testbed.batches import MicroBatch
from megatron_lynx.testbed.gradients import finalize_without_ddp, gradients, named_parameters
from megatron_lynx.testbed.step import run_schedule, train_step


class Training:
    """A model being trained.

    Args:
        job: what is trained; its layout and batch sizes.
        chunks: this rank's chunks, as `build_model` returns them.
        optimizer: plain SGD (no reduction over replicas unless `ddp`), Megatron's Adam, or none.
            Megatron's needs `ddp`; it is the distributed one if the job says so.
        ddp: wrap the chunks in Megatron's DistributedDataParallel.
        buffers_of: one with `ddp` whose parameters these chunks share: its wrappers' buffers and hooks serve both.
        overlap_grad_reduce: reduce buckets during backward (needs `ddp`).
        overlap_param_gather: gather parameters during forward (needs the distributed optimizer and `overlap_grad_reduce`).
        learning_rate: of either optimizer.
        settings: of Megatron's optimizer, in place of what `megatron_optimizer` has (`optimizer="sgd"`, say).
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
            self.chunks = [around(*both) for both in zip(buffers_of.chunks, chunks, strict=True)]
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
        """One optimizer step. The losses of its micro-batches (on the last stage; elsewhere none)."""
        return train_step(self.chunks, self.optimizer, self.job, batches)

    def evaluate(self, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
        """Forward only, without gradients and dropout. Losses as in `step`."""
        for chunk in self.chunks:
            chunk.eval()
        losses = run_schedule(self.chunks, self.job, batches, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return losses

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters of all chunks by name, without the names of wrappers."""
        return named_parameters(self.chunks)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients of the last step, as reduced: DDP's `main_grad`, or `grad`.

        With the distributed optimizer and more than one replica a rank's own shard is reduced, the rest is not.
        """
        return gradients(self.chunks)


def with_ddp(
    job: Job, chunks: Sequence[torch.nn.Module], overlap_grad_reduce: bool, overlap_param_gather: bool
) -> list[torch.nn.Module]:
    """The chunks in Megatron's DistributedDataParallel, gradients as the job has them; several buckets even of a tiny model."""
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
        DistributedDataParallel(get_model_config(chunk), config, chunk, disable_bucketing=index > 0)  # as pretraining does it
        for index, chunk in enumerate(chunks)
    ]


def in_gradients(job: Job) -> bool:
    """Whether parameters are gathered in the buffer of gradients."""
    recipe = job.model.fp8_recipe
    return recipe is not None and job.model.fp8_parameters and not STORED[recipe].held_in_buffer


def around(wrapper: torch.nn.Module, chunk: torch.nn.Module) -> torch.nn.Module:
    """What is around one chunk, around another one that shares its parameters.

    A second DistributedDataParallel of the same parameters would point `main_grad` to buffers of its own, which the first one
    would not know, and every model of a comparison would need as much memory again.
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
    """Megatron's mixed-precision AdamW with gradient clipping, or as `settings` have it, distributed over replicas if the job
    says so."""
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
