"""Decides the layers of each stage if a job leaves them open (`parallel.partition: auto`).

every stage with n layers: one job ──Stages──> seconds of each stage ──best──> layers of each stage ──> its chunks

    step = (m - 1) x slowest stage  +  all stages once       time(s, n): stage s with n layers; infinite if none fits

A dynamic programme over (stage, layers before it) keeps the ways that no other one beats in both the slowest stage and the sum.
A stage takes at most an m-th of the even partition's step, so few counts above the even ones are priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf

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

Way = tuple[float, float, Counts]
"""Seconds of the slowest of the first stages, of all of them, and their layers."""


def partitioned(job: Job, profile: Profile) -> list[Stages]:
    """Return the stages of the job with known layers; if they were open, spread evenly, and as fastest by the closed form of a
    step. A rehearsal decides between the two. Raises `Infeasible` if nothing fits."""
    if job.parallel.partition != "auto":
        return [Stages(job, profile)]
    if len(job.model.kinds_of(range(1, job.model.layers + 1))) > 1:  # `_Times` knows stages by their number of layers
        return [Stages(with_partition(job, job.partition), profile)]
    times = _Times(job, profile)
    layers, stages = job.model.layers, job.parallel.pipeline
    counts = best(layers, stages, job.microbatches, times.of, job.chunks)
    if counts is None:
        return [times.like]
    fitting = [partition for partition in (even(layers, stages), counts) if step_s(partition, job.microbatches, times.of) < inf]
    parted = [with_partition(job, _by_virtual_stage(partition, job.chunks)) for partition in dict.fromkeys(fitting)]
    return [Stages(each, profile, times.like) for each in parted]


def with_partition(job: Job, partition: tuple[int, ...]) -> Job:
    """Return the job with these layers of virtual stages, and their sum as its layers."""
    parallel = job.parallel.model_copy(update={"partition": partition, "layers_per_chunk": None})
    model = job.model.model_copy(update={"layers": sum(partition)})
    return job.model_copy(update={"parallel": parallel, "model": model})


def _by_virtual_stage(counts: Counts, chunks: int) -> Counts:
    by_stage = [spread(count, chunks, last_stage=stage == len(counts) - 1) for stage, count in enumerate(counts)]
    return tuple(layers[chunk] for chunk in range(chunks) for layers in by_stage)


@dataclass(frozen=True)
class _Times:
    job: Job
    profile: Profile

    @once
    def of(self, stage: int, count: int) -> float:
        """Infinite if the layers do not fit, or are fewer than the chunks."""
        if count < self.job.chunks:
            return inf
        try:
            return self._stages(count).answer(stage).seconds(self.job.microbatches) + self._messages_s(stage)
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
        return Stages(with_partition(self.job, _by_virtual_stage(counts, self.job.chunks)), self.profile, self.like)

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
    """Return the fastest partition, or None if none fits. Ties go to the even one, then to fewer layers on the first stages.

    `fewest`: layers of a stage. `time` grows with their number.
    """
    start = even(layers, stages)
    start_s = step_s(start, microbatches, time)
    bound_s = start_s / microbatches + 10.0**-SECOND_DIGITS
    counts_of_any = range(fewest, layers - fewest * (stages - 1) + 1)
    most = [_most(stage, count, time, bound_s, counts_of_any) for stage, count in enumerate(start)]
    reached: dict[int, list[Way]] = {0: [(0.0, 0.0, ())]}
    for stage in range(stages):
        longer: dict[int, list[Way]] = {}
        counts = range(max(fewest, layers - (sum(most) - most[stage])), most[stage] + 1)
        times = [(count, time(stage, count)) for count in counts]
        for (before, ways), (count, seconds) in product(reached.items(), times):
            added = [(max(pace_s, seconds), total_s + seconds, (*counts, count)) for pace_s, total_s, counts in ways]
            longer.setdefault(before + count, []).extend(added)
        reached = {before: _unbeaten(ways) for before, ways in longer.items() if before <= layers}
    steps = [((microbatches - 1) * pace_s + total_s, counts) for pace_s, total_s, counts in reached.get(layers, ())]
    if steps and step_s(found := min(steps)[1], microbatches, time) < start_s:
        return found
    return start if start_s < inf else None


def _most(stage: int, count: int, time: StageTime, bound_s: float, counts: range) -> int:
    """Return the largest of the counts that fits and is within the bound, found from `count` on; 0 if none is."""

    def within(count: int) -> bool:
        return count in counts and time(stage, count) < inf and time(stage, count) <= bound_s

    while count and not within(count):
        count -= 1
    while within(count + 1):
        count += 1
    return count


def _unbeaten(ways: Iterable[Way]) -> list[Way]:
    """Return those that no other one beats or equals in both their slowest stage and their sum."""
    kept: list[Way] = []
    for way in sorted(ways):
        if not kept or way[1] < kept[-1][1]:
            kept.append(way)
    return kept


def spread(count: int, chunks: int, *, last_stage: bool) -> Counts:
    """Spread the layers of a stage evenly over its chunks. Chunks with an end of the model get fewer: the first ones, or on the
    last stage the last ones."""
    counts = even(count, chunks)
    return tuple(reversed(counts)) if last_stage else counts
