"""The testbed's training with an optimizer, evaluation, and what DistributedDataParallel overlaps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, Literal

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import get_model_config

from megatron_lynx.config.job import Job
from megatron_lynx.testbed import training
from megatron_lynx.testbed.training import MicroBatch, in_gradients, run_schedule


class Training(training.Training):
    """A model in training.

    Args:
        optimizer: plain SGD (without reduction over replicas unless `ddp`), Megatron's Adam, or None.
            Megatron's needs `ddp`, and is distributed if the job says so.
        ddp, buffers_of: as the testbed's.
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
        buffers_of: training.Training | None = None,
        overlap_grad_reduce: bool = False,
        align_grad_reduce: bool = True,
        overlap_param_gather: bool = False,
        learning_rate: float = 0.1,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        overlaps = {"overlap_grad_reduce": overlap_grad_reduce, "overlap_param_gather": overlap_param_gather}
        super().__init__(job, chunks, ddp=ddp, buffers_of=buffers_of, **overlaps)
        self.optimizer: Any = None
        config = get_model_config(self.chunks[0])
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
        """Run one optimizer step. Gradients stay readable until the next one."""
        losses = super().step(batches)
        if self.optimizer is not None:
            self.optimizer.step()
        return losses

    def evaluate(self, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
        return evaluated(self, batches)


def evaluated(trained: training.Training, batches: Iterable[MicroBatch]) -> list[torch.Tensor]:
    """Run forward only, without gradients and dropout; return losses as `step`."""
    for chunk in trained.chunks:
        chunk.eval()
    losses = run_schedule(trained.chunks, trained.job, batches, forward_only=True)
    for chunk in trained.chunks:
        chunk.train()
    return losses


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
