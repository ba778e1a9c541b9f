"""Yields every layout of a job on a number of devices that Megatron accepts.

    gpus = tensor x context x pipeline x data

    tensor     divides heads, key/value groups and FFN; within a node
    expert     divides the experts, if the model has any; each expert is split as in the job, by default not; tensor parallelism
               then needs sequence parallelism
    context    two slices of each sequence per rank; needs fused attention, and divisible heads for all-to-all
    pipeline   divides the layers
    chunks     divides the layers of a stage; with several, the micro-batches of a pipeline are a multiple of its stages
    data       the rest; divides the batch
    micro      divides a replica's share of the batch; FP8 restricts the number of rows

Order: tensor, context, pipeline, chunks, then micro-batch, smallest first; without sequence parallelism before with it.
All stages have the same number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from megatron_lynx.config.experts import Experts
from megatron_lynx.config.fit import fp8_problems
from megatron_lynx.config.job import MOST_MICROBATCHES, Batch, Job
from megatron_lynx.config.parallel import Parallel


@dataclass(frozen=True)
class Space:
    """The job gives its model, cluster, batch and budget; and `parallel.distributed_optimizer`, which is on by default."""

    job: Job
    gpus: int
    contexts: tuple[int, ...] | None = None

    def takes_plans(self, layout: Parallel) -> bool:
        """Whether a layout is planned, which is slow: with context parallelism only if requested."""
        job_context = self.job.parallel.context
        return layout.context in ((1, job_context) if self.contexts is None else self.contexts)

    def layouts(self) -> Iterator[list[Job]]:
        """Yield the jobs of each layout, one for each micro-batch size, with policy `none`."""
        for layout in self._layouts():
            if jobs := [self._job(layout, micro) for micro in self._sizes(layout)]:
                yield jobs

    def _sizes(self, layout: Parallel) -> Iterator[int]:
        """Micro-batch sizes."""
        share, interleaves = self._share(layout.ranks), layout.layers_per_chunk is not None
        for micro in divisors(share):
            count = share // micro
            runs = count <= MOST_MICROBATCHES and not (interleaves and count % layout.pipeline)
            if runs and not fp8_problems(self.job.model, layout, micro, self.job.cluster):
                yield micro

    def _job(self, layout: Parallel, micro: int) -> Job:
        stated = {"gpus": self.gpus, "parallel": layout, "policy": "none", "offload_ratio": 0.0}
        batch = Batch.model_construct(micro=micro, global_=self.job.batch.global_)
        return self.job.model_copy(update={**stated, "batch": batch})

    def _layouts(self) -> Iterator[Parallel]:
        for tensor in self._tensors():
            for context in self._contexts(tensor):
                for pipeline in divisors(self.gpus // (tensor * context)):
                    replicas = self.gpus // (tensor * context * pipeline)
                    if self.job.model.layers % pipeline == 0 and self.job.batch.global_ % replicas == 0:
                        yield from self._chunked(tensor, context, pipeline)

    def _share(self, ranks: int) -> int:
        """A replica's sequences."""
        return self.job.batch.global_ // (self.gpus // ranks)

    def _tensors(self) -> Iterator[int]:
        cut = gcd(self.job.model.heads, self.job.model.kv_groups, self.job.model.ffn, self.gpus)
        return (tensor for tensor in divisors(cut) if self.job.cluster.keeps_together(tensor, self.gpus))

    def _contexts(self, tensor: int) -> Iterator[int]:
        model, sizes = self.job.model, divisors(self.gpus // tensor)
        for context in sizes if self.contexts is None else filter(self.contexts.__contains__, sizes):
            if context == 1 or (model.attention == "flash" and model.seq % (2 * context) == 0 and self._trades(tensor, context)):
                yield context

    def _trades(self, tensor: int, context: int) -> bool:
        model, stated = self.job.model, self.job.parallel
        if stated.context_exchange == "a2a+p2p":
            return context == stated.context
        return stated.context_exchange != "a2a" or gcd(model.heads, model.kv_groups) % (tensor * context) == 0

    def _chunked(self, tensor: int, context: int, pipeline: int) -> Iterator[Parallel]:
        stage_layers, stated = self.job.model.layers // pipeline, self.job.parallel
        if self.gpus // (tensor * pipeline) % stated.optimizer_instances:
            return
        interleaves = pipeline > 1 and self._share(tensor * context * pipeline) % pipeline == 0
        for chunks in divisors(stage_layers) if interleaves else (1,):
            for sequence_parallel in self._sequence_parallel(tensor, context):
                parallel = Parallel.model_construct(
                    tensor=tensor,
                    context=context,
                    context_exchange=stated.context_exchange if context > 1 else "p2p",
                    context_levels=stated.context_levels if context > 1 else None,
                    pipeline=pipeline,
                    layers_per_chunk=None if chunks == 1 else stage_layers // chunks,
                    partition=None,
                    sequence_parallel=sequence_parallel,
                    distributed_optimizer=stated.distributed_optimizer or "distributed_optimizer" not in stated.model_fields_set,
                    optimizer_instances=stated.optimizer_instances,
                )
                yield from [parallel] if self.job.model.experts is None else self._with_experts(parallel, self.job.model.experts)

    def _with_experts(self, parallel: Parallel, experts: Experts) -> Iterator[Parallel]:
        cut, tensor = self.job.parallel.expert_tensor or 1, parallel.tensor
        if (tensor > 1 and not parallel.sequence_parallel) or experts.ffn % cut or experts.shared_ffn % tensor:
            return
        for expert in divisors(experts.count):
            if self.gpus % (expert * cut * parallel.pipeline * parallel.optimizer_instances) == 0:
                yield parallel.model_copy(update={"expert": expert, "expert_tensor": cut})

    def _sequence_parallel(self, tensor: int, context: int) -> tuple[bool, ...]:
        slices = tensor * (1 if context == 1 else 2 * context)
        if tensor == 1 or self.job.model.seq % slices:
            return () if tensor > 1 and self.job.overlap.userbuffers else (False,)
        return (True,) if self.job.overlap.userbuffers else (False, True)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return tuple(sorted({*small, *(number // divisor for divisor in small)}))
