"""Decides the layers of each stage if a job leaves them open (`parallel.partition: auto`).

every stage with n layers: one job ──Stages──> seconds of each stage ──partition.best──> layers of each stage ──> its chunks

Layers are only moved if the job allows it, because the launch must agree with the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from megatron_lynx.config.job import Job
from megatron_lynx.cost.stage import stage_seconds
from megatron_lynx.errors import Infeasible
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.solver.partition import best, even, spread, step_s
from megatron_lynx.solver.stages import Stages


def partitioned(job: Job, profile: Profile) -> list[Job]:
    """Return the job with known layers; if they were open, spread evenly, and as fastest by the closed form of a step. A
    rehearsal decides between the two. Raises `Infeasible` if nothing fits."""
    if job.parallel.partition != "auto":
        return [job]
    if not job.model.alike:  # `_Times` knows stages by their number of layers
        return [with_partition(job, job.partition)]
    times = _Times(job, profile)
    layers, stages = job.model.layers, job.parallel.pipeline
    microbatches = job.microbatches if job.schedule == "flush" else NEVER_FLUSHED
    counts = best(layers, stages, microbatches, times.of, times.least)
    if counts is None:
        return [job]
    fitting = [partition for partition in (even(layers, stages), counts) if step_s(partition, microbatches, times.of) < inf]
    return [with_partition(job, _by_virtual_stage(partition, job.chunks)) for partition in dict.fromkeys(fitting)]


def with_partition(job: Job, partition: tuple[int, ...]) -> Job:
    """Return the job with these layers of virtual stages, and their sum as its layers."""
    parallel = job.parallel.model_copy(update={"partition": partition, "layers_per_chunk": None})
    model = job.model.model_copy(update={"layers": sum(partition)})
    return job.model_copy(update={"parallel": parallel, "model": model})


def _by_virtual_stage(counts: tuple[int, ...], chunks: int) -> tuple[int, ...]:
    last = len(counts) - 1
    by_stage = [spread(count, chunks, last_stage=stage == last) for stage, count in enumerate(counts)]
    return tuple(layers[chunk] for chunk in range(chunks) for layers in by_stage)


NEVER_FLUSHED = 1_000_000
"""Stands for the micro-batches of a pipeline that is filled only once, so that only the slowest stage counts."""


@dataclass(frozen=True)
class _Times:
    """Seconds of stages by number of layers."""

    job: Job
    profile: Profile
    alike: dict[int, Stages] = field(default_factory=dict)
    known: dict[tuple[int, int], float] = field(default_factory=dict)

    def of(self, stage: int, count: int) -> float:
        """Infinite if the layers do not fit, or are fewer than the chunks."""
        if count < self.job.chunks:
            return inf
        if (stage, count) not in self.known:
            try:
                answer = self._stages(count).answer(stage)
                self.known[stage, count] = answer.seconds(self.job.microbatches) + self._messages_s(stage)
            except Infeasible:
                self.known[stage, count] = inf
        return self.known[stage, count]

    def least(self, stage: int, count: int) -> float:
        """Seconds of a stage without recomputation."""
        alike = with_partition(self.job, (count,) * self.job.parallel.pipeline)
        stock = stage_seconds(alike, self.profile, stage)
        return stock.both_s + self._messages_s(stage)

    def _messages_s(self, stage: int) -> float:
        """Seconds for which messages block a stage: with one chunk both sides wait (`cost.stage.step_s`), unless posted early."""
        if self.job.chunks > 1 or (self.job.schedule == "double_buffered" and self.job.defer_updates):
            return 0.0
        neighbours = (stage > 0) + (stage < self.job.parallel.pipeline - 1)
        return neighbours * self.profile.link_s("p2p", LayerShape.of(self.job).input_bytes)

    def _stages(self, count: int) -> Stages:
        if count not in self.alike:
            counts = (count,) * self.job.parallel.pipeline
            self.alike[count] = Stages(with_partition(self.job, _by_virtual_stage(counts, self.job.chunks)), self.profile)
        return self.alike[count]
