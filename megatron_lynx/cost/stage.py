"""Seconds of a stage's passes, and chunks in flight.

Maximum chunks between forward and backward:

1F1B, p = 4          stage 0 1 2 3            p - s
chunks in flight           4 3 2 1
without flushes            4 3 2 1            p - s, always
interleaved, v = 2   stage 0 1 2 3            2(p - 1 - s) + (v - 1)g + 1      g: micro-batches of a group, usually p
chunks in flight          11 9 7 5            on stage 0, g = p: vp + p - 1

Unequal chunks are counted one by one (`schedule.flushes.counts_at_backwards`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import mul
from typing import TypeVar

from megatron_lynx.anatomy import PASSES, Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.ends import ends_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.flushes import counts_at_backwards, warmup
from megatron_lynx.timeline import Passes

T = TypeVar("T")


def cooldown_backwards(job: Job, stage: int) -> int:
    """Return how many backwards of a stage with one chunk follow another one; without flushes, only those that end training."""
    return min(job.parallel.pipeline - 1 - stage, job.microbatches) if job.schedule == "flush" else 0


@dataclass(frozen=True)
class HalfSeconds:
    """One micro-batch in one half; `again_s` is its recomputation."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0


def half_seconds(profile: Profile, section: Section) -> HalfSeconds:
    """Return a half without recomputation, with its exposed collectives; profiles of experts include them."""
    half = profile.of(section)
    if section.exchanges:
        return HalfSeconds(half.forward_s, half.backward_s)
    forward_s, backward_s = (sum(window_lengths_s(profile, passing, section, profile.message_bytes)) for passing in PASSES)
    return HalfSeconds(half.forward_s + forward_s, half.backward_s + backward_s)


def stage_seconds(job: Job, profile: Profile, stage: int) -> Passes:
    """Return one micro-batch on a stage without recomputation."""
    counts, last = job.halves_on(stage), stage == job.parallel.pipeline - 1
    ends = ends_of(profile, LayerShape.of(job).gathered_bytes, first=stage == 0, last=last, pieces=job.head_pieces)
    halves = {section: half_seconds(profile, section) for section in job.model.every_section}
    forward_s, backward_s = (
        sum(counts[section] * getattr(seconds, name) for section, seconds in halves.items())
        for name in ("forward_s", "backward_s")
    )
    return Passes(forward_s + sum(end.forward_s for end in ends), backward_s + sum(end.backward_s for end in ends))


def of_every_stage(job: Job, value: Callable[[int], T]) -> list[T]:
    """Evaluate `value` once per group of equal stages: same layers of each kind, same end of the model."""
    pipeline, uniform = job.parallel.pipeline, job.model.uniform
    known: dict[object, T] = {}
    values = []
    for stage in range(pipeline):
        layers = job.layers_on(stage) if uniform else frozenset(job.kinds_on(stage).items())
        kind = layers, stage == 0, stage == pipeline - 1
        if kind not in known:
            known[kind] = value(stage)
        values.append(known[kind])
    return values


def chunks_in_flight(job: Job, stage: int) -> int:
    return min(job.microbatches * job.chunks, warmup(job.parallel.pipeline, stage, job.chunks, job.microbatch_group) + 1)


def most_in_flight_bytes(job: Job, stage: int, sizes: Sequence[int], chunk: int | None = None) -> int:
    """Return the peak of all micro-batches in flight when a backward of `chunk`, or any, begins. `sizes`: bytes per micro-batch
    in each chunk of the stage."""
    counts = counts_at_backwards(job.parallel.pipeline, stage, job.microbatches, job.chunks, job.microbatch_group)
    some = chain.from_iterable(counts) if chunk is None else counts[chunk]
    peak_bytes: int = max(sum(map(mul, in_flight, sizes)) for in_flight in some)
    return peak_bytes


def microbatches_in_flight(job: Job, stage: int) -> int:
    """Return the micro-batches in flight of a stage's first chunk, whose backward is last."""
    pipeline = job.parallel.pipeline
    return min(job.microbatches, pipeline - stage if job.chunks == 1 else job.microbatch_group)
