"""Decides the layers of each stage if a job leaves them open (`parallel.partition: auto`).

every stage with n layers: one job ──Stages──> seconds of each stage ──best──> layers of each stage ──> its chunks

    step = (m - 1) x slowest stage  +  all stages once       time(s, n): stage s with n layers; infinite if none fits

From the even partition single layers move between stages, until no move makes the slowest stages faster, then until none makes
the step shorter. That is the fastest partition if no layer takes less time than the one below it; few counts are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from math import inf
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.errors import Infeasible
from megatron_lynx.once import once
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.solver.stages import Stages
from megatron_lynx.units import SECOND_DIGITS

StageTime = Callable[[int, int], float]
"""Seconds of one micro-batch, forward and backward, on a stage by its layers; `inf` if they do not fit."""

Counts = tuple[int, ...]
"""Layers of each stage."""


def partitioned(job: Job, profile: Profile) -> list[Stages]:
    """Return the stages of the job with known layers; if they were open, spread evenly, and as fastest by the closed form of a
    step. A rehearsal decides between the two. Raises `Infeasible` if nothing fits."""
    if job.parallel.partition != "auto":
        return [Stages(job, profile)]
    if not job.model.uniform:  # `_Times` knows stages by their number of layers
        return [Stages(with_partition(job, job.partition), profile)]
    times = _Times(job, profile)
    layers, stages = job.model.layers, job.parallel.pipeline
    counts = best(layers, stages, job.microbatches, times.of, job.chunks)
    if counts is None:
        return [times.like]
    fitting = [partition for partition in (even(layers, stages), counts) if step_s(partition, job.microbatches, times.of) < inf]
    parted = [with_partition(job, by_virtual_stage(partition, job.chunks)) for partition in dict.fromkeys(fitting)]
    return [Stages(each, profile, times.like) for each in parted]


def with_partition(job: Job, partition: tuple[int, ...]) -> Job:
    """Return the job with these layers of virtual stages, and their sum as its layers."""
    parallel = job.parallel.model_copy(update={"partition": partition, "layers_per_chunk": None})
    model = job.model.model_copy(update={"layers": sum(partition)})
    return job.model_copy(update={"parallel": parallel, "model": model})


def by_virtual_stage(counts: Counts, chunks: int) -> Counts:
    """Spread each stage's layers evenly over its chunks. Chunks with an end of the model get fewer: the first ones, or the last
    ones of the last stage."""
    *by_stage, last = (even(count, chunks) for count in counts)
    return tuple(layers[chunk] for chunk in range(chunks) for layers in (*by_stage, last[::-1]))


@dataclass(frozen=True)
class _Times:
    job: Job
    profile: Profile

    @once
    def of(self, stage: int, count: int) -> float:
        """Infinite if the layers do not fit, or are fewer than the chunks."""
        stages = self._stages(count) if count >= self.job.chunks else None
        if stages is None or (self.job.offload_ratio == "auto" and not stages.least_fits(stage)):  # shares take long to try
            return inf
        try:
            return stages.answer(stage).seconds(self.job.microbatches) + self._messages_s(stage)
        except Infeasible:
            return inf

    def _messages_s(self, stage: int) -> float:
        """Seconds for which messages block a stage: with one chunk both sides wait, unless posted early."""
        if self.job.chunks > 1 or (self.job.schedule == "double_buffered" and self.job.defer_updates):
            return 0.0
        neighbours = (stage > 0) + (stage < self.job.parallel.pipeline - 1)
        return neighbours * self.profile.link_s("p2p", LayerShape.of(self.job).input_bytes)

    @once
    def _stages(self, count: int) -> Stages:
        counts = (count,) * self.job.parallel.pipeline
        return Stages(with_partition(self.job, by_virtual_stage(counts, self.job.chunks)), self.profile, self.like)

    @cached_property
    def like(self) -> Stages:
        return Stages(self.job, self.profile)


def step_s(counts: Sequence[int], microbatches: int, time: StageTime) -> float:
    """Return the seconds of a step by the closed form of 1F1B. Times include delaying messages."""
    times = [time(stage, count) for stage, count in enumerate(counts)]
    return inf if inf in times else round((microbatches - 1) * max(times) + sum(times), SECOND_DIGITS)


def even(layers: int, stages: int) -> Counts:
    """Spread layers evenly. The remainder goes to the last stages, which have fewer micro-batches in flight."""
    count, more = divmod(layers, stages)
    return (count,) * (stages - more) + (count + 1,) * more


def best(layers: int, stages: int, microbatches: int, time: StageTime, fewest: int = 1) -> Counts | None:
    """Return the fastest partition, or None if none fits. `fewest`: layers of a stage."""

    def slowest(counts: Counts) -> tuple[int, list[float]]:
        """Layers of stages that do not fit, and all times, the longest first."""
        times = [time(stage, count) for stage, count in enumerate(counts)]
        return sum(count for count, seconds in zip(counts, times, strict=True) if seconds == inf), sorted(times, reverse=True)

    def step(counts: Counts) -> float:
        return step_s(counts, microbatches, time)

    found = even(layers, stages)
    ranks: tuple[Callable[[Counts], Any], ...] = (slowest, step)
    for rank in ranks:
        while rank(moved := min(_moves(found, fewest), key=rank, default=found)) < rank(found):
            found = moved
    return found if step(found) < inf else None


def _moves(counts: Counts, fewest: int) -> Iterator[Counts]:
    """Move a layer from one stage to another."""
    for source, target in permutations(range(len(counts)), 2):
        if counts[source] > fewest:
            yield tuple(count - (stage == source) + (stage == target) for stage, count in enumerate(counts))
