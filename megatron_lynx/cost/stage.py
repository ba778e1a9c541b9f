"""Seconds of a stage's passes and of a whole step, and how much of it is under way at once.

stage 0   F F F B F B F B B B        step = (m - 1) x the slowest stage's F+B  +  the F+B of every stage once,
stage 1     F B F B F B F B                 each with the messages that it exchanges with its neighbours

How many chunks a stage holds between their forward and their backward, at most:

1F1B, p = 4          stage 0 1 2 3            p - s
chunks in flight           4 3 2 1
without flushes            4 3 2 1            p - s, all the time
interleaved, v = 2   stage 0 1 2 3            2(p - 1 - s) + (v - 1)g + 1      g: micro-batches of a group, usually p
chunks in flight          11 9 7 5            on stage 0, g = p: vp + p - 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import embedding_of, window_lengths_s
from megatron_lynx.cost.prediction import last_end_of
from megatron_lynx.profiler.profile import BlockProfile, Profile
from megatron_lynx.profiler.shape import LayerShape

T = TypeVar("T")


@dataclass(frozen=True)
class StageSeconds:
    """One micro-batch on one stage."""

    forward_s: float
    backward_s: float

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Phases:
    """How many backwards of a stage follow a forward (steady), and how many follow another backward (cool-down)."""

    steady: int
    cooldown: int

    @property
    def steady_share(self) -> float:
        return self.steady / (self.steady + self.cooldown)


def phases_of(job: Job, stage: int) -> Phases:
    """The phases of a stage that has one chunk. Without flushes there is no cool-down but at the end of training."""
    if job.schedule == "double_buffered":
        return Phases(steady=job.microbatches, cooldown=0)
    warmup = min(job.parallel.pipeline - 1 - stage, job.microbatches)
    return Phases(steady=job.microbatches - warmup, cooldown=warmup)


@dataclass(frozen=True)
class LayerSeconds:
    """One micro-batch in one layer: each half, with the waits for its collectives."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    replay_s: float = 0.0
    """What runs again before the backward."""
    experts: ExpertSeconds | None = None
    """What stands in place of the second half, and of the replay, in layers of experts."""


@dataclass(frozen=True)
class ExpertSeconds:
    """One micro-batch in the MLP half of a layer of experts, exchanges included."""

    forward_s: float
    backward_s: float
    replay_s: float = 0.0
    """What runs again before the backward of such a layer."""


def layer_seconds(profile: Profile, message_bytes: int) -> LayerSeconds:
    """A layer of stock Megatron that recomputes nothing."""
    halves = [(section, profile.half(half)) for half, section in profile.shape.halves.items()]
    return LayerSeconds(
        forward_s=tuple(each.forward_s + sum(window_lengths_s(profile, "fwd", own, message_bytes)) for own, each in halves),
        backward_s=tuple(each.backward_s + sum(window_lengths_s(profile, "bwd", own, message_bytes)) for own, each in halves),
        experts=None if profile.experts is None else ExpertSeconds(profile.experts.forward_s, profile.experts.backward_s),
    )


def stage_seconds(job: Job, profile: Profile, stage: int, message_bytes: int) -> StageSeconds:
    """A stage of stock Megatron that recomputes nothing."""
    return stage_of_layers(job, profile, stage, layer_seconds(profile, message_bytes))


def stage_of_layers(job: Job, profile: Profile, stage: int, layer: LayerSeconds) -> StageSeconds:
    """A stage of such layers, with the ends of the model that it holds."""
    layers, mixtures, ends = job.layers_on(stage), job.experts_on(stage), _ends(job, profile, stage)
    counts = (layers, layers - mixtures)
    forward, backward = (
        sum(count * half_s for count, half_s in zip(counts, halves, strict=True))
        for halves in (layer.forward_s, layer.backward_s)
    )
    replay_s = (layers - mixtures) * layer.replay_s
    if layer.experts is not None:
        forward, backward = forward + mixtures * layer.experts.forward_s, backward + mixtures * layer.experts.backward_s
        replay_s += mixtures * layer.experts.replay_s
    return StageSeconds(forward + sum(end.forward_s for end in ends), backward + sum(end.backward_s for end in ends) + replay_s)


def _ends(job: Job, profile: Profile, stage: int) -> list[BlockProfile]:
    """The ends of the model that a stage holds: most hold none."""
    message_bytes = LayerShape.of(job).gathered_bytes
    first = [embedding_of(profile, message_bytes)] if stage == 0 else []
    last = [last_end_of(profile, message_bytes, job.head_pieces)] if stage == job.parallel.pipeline - 1 else []
    return first + last


def of_every_stage(job: Job, value: Callable[[int], T]) -> list[T]:
    """A value of each stage, asked for once where stages are alike: as many layers, as many of them with experts, and the same
    end of the model, if any."""
    partition, pipeline = job.partition, job.parallel.pipeline
    known: dict[tuple[int, int, bool, bool], T] = {}
    values = []
    for stage in range(pipeline):
        kind = (sum(partition[stage::pipeline]), job.experts_on(stage), stage == 0, stage == pipeline - 1)
        if kind not in known:
            known[kind] = value(stage)
        values.append(known[kind])
    return values


def step_s(stages: Sequence[StageSeconds], microbatches: int, p2p_s: float) -> float:
    """One step of 1F1B, without the optimizer: messages hold up both sides, so each stage pays one for each neighbour."""
    paces = [stage.both_s + p2p_s * ((number > 0) + (number < len(stages) - 1)) for number, stage in enumerate(stages)]
    return (microbatches - 1) * max(paces) + sum(paces)


def chunks_in_flight(job: Job, stage: int) -> int:
    """How many one stage holds; each is one chunk of one micro-batch."""
    return _in_flight(job.parallel.pipeline, job.chunks, job.microbatches, job.microbatch_group, stage)


def chunks_in_flight_by_stage(job: Job) -> list[int]:
    """How many each stage holds."""
    pipeline, chunks, microbatches, group = job.parallel.pipeline, job.chunks, job.microbatches, job.microbatch_group
    return [_in_flight(pipeline, chunks, microbatches, group, stage) for stage in range(pipeline)]


def _in_flight(pipeline: int, chunks: int, microbatches: int, group: int, stage: int) -> int:
    if chunks == 1:
        return min(pipeline - stage, microbatches)
    return min(microbatches * chunks, 2 * (pipeline - 1 - stage) + (chunks - 1) * group + 1)


def microbatches_in_flight(job: Job, stage: int) -> int:
    """How many micro-batches of a stage's first chunk, whose backward comes last, it holds."""
    pipeline = job.parallel.pipeline
    return min(job.microbatches, pipeline - stage if job.chunks == 1 else job.microbatch_group)
