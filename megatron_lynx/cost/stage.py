"""Seconds of a stage's passes and of a whole step.

stage 0   F F F B F B F B B B        step = (m - 1) x the slowest stage's F+B  +  the F+B of every stage once
stage 1     F B F B F B F B                 + the messages on the way down and up
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.items import HALVES
from megatron_lynx.profiler.profile import Profile


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
    """How many backwards of a 1F1B stage follow a forward (steady), and how many follow another backward (cool-down)."""

    steady: int
    cooldown: int

    @property
    def steady_share(self) -> float:
        return self.steady / (self.steady + self.cooldown)


def phases_of(job: Job, stage: int) -> Phases:
    warmup = min(job.parallel.pipeline - 1 - stage, job.microbatches)
    return Phases(steady=job.microbatches - warmup, cooldown=warmup)


def stage_seconds(job: Job, profile: Profile, stage: int, message_bytes: int) -> StageSeconds:
    """A stage of stock Megatron that recomputes nothing."""
    layers = job.layers_on(stage)
    forward = backward = 0.0
    for half in HALVES:
        forward += layers * (profile.half(half).forward_s + sum(window_lengths_s(profile, "fwd", half, message_bytes)))
        backward += layers * (profile.half(half).backward_s + sum(window_lengths_s(profile, "bwd", half, message_bytes)))
    first, last = stage == 0, stage == job.parallel.pipeline - 1
    forward += first * profile.embedding.forward_s + last * profile.head.forward_s
    backward += first * profile.embedding.backward_s + last * profile.head.backward_s
    return StageSeconds(forward, backward)


def step_s(stages: Sequence[StageSeconds], microbatches: int, p2p_s: float) -> float:
    """One step of 1F1B, without the optimizer."""
    slowest = max(stage.both_s for stage in stages)
    return (microbatches - 1) * slowest + sum(stage.both_s for stage in stages) + 2 * (len(stages) - 1) * p2p_s
