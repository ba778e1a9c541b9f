"""A stock setting priced: what every stage holds, as the maximum over moments, and the simulated step.

Seconds are of forwards and backwards, without gradients' reductions and the optimizer's update, which no setting changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import head_of
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.stage import of_every_stage
from megatron_lynx.cost.step_range import StepRange, hiding_all
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.interleaved import interleaved
from megatron_lynx.schedule.one_f_one_b import one_f_one_b
from megatron_lynx.schedule.schedule import Schedule
from megatron_lynx.search.simulated import in_steady_state
from megatron_lynx.simulator.passes import ChunkPasses
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock.setting import StockSetting
from megatron_lynx.stock.stage import StockStage, deferred_heads

WALKED_GROUPS = 4
"""Copies are walked through so many times as many micro-batches as there are stages: by then each phase looks as it stays."""


@dataclass(frozen=True)
class Priced:
    """What a setting costs a job."""

    setting: StockSetting
    stages: tuple[StageMemory, ...]
    step: StepRange
    host_bytes: int = 0
    """Page-locked memory of the rank that needs most."""
    busy_s: float = 0.0
    """Of the step: forwards and backwards of the busiest stage."""

    @property
    def step_s(self) -> float:
        """By which settings are ranked."""
        return self.step.expected_s

    @property
    def most_bytes(self) -> int:
        """What the fullest device holds."""
        return max(stage.total for stage in self.stages)


def priced(job: Job, profile: Profile, setting: StockSetting) -> Priced:
    """The setting's price. `profile`: of the job's layers, as `analytic_profile` or a measurement makes it.

    The step is a range where userbuffers hide an unknown part of the exchanges, and where an unknown part of the head's deferred
    weight gradients runs while the last stage waits at the end of the step."""
    if setting.userbuffers and not job.userbuffers:
        job = job.with_userbuffers(True)
    pipeline, more = job.parallel.pipeline, int(setting.overlap)
    stages = [StockStage(job, setting, stage) for stage in range(pipeline)]
    walked = schedule_of(job, min(job.microbatches, WALKED_GROUPS * job.microbatch_group), more)
    copies = [stage.copies(profile, walked) for stage in stages]
    chunks = [stage.passes(profile, own) for stage, own in zip(stages, copies, strict=True)]
    message_s = profile.link_s("p2p", LayerShape.of(job).input_bytes) if pipeline > 1 else 0.0

    def step_s(chunks: Sequence[Sequence[ChunkPasses]]) -> float:
        def simulated(microbatches: int) -> Simulation:
            schedule = schedule_of(job, microbatches, more)
            return simulate(schedule, chunks, message_s, between_passes=not job.overlap.messages)

        return in_steady_state(job, simulated)

    most_s = least_s = step_s(chunks)
    if job.userbuffers:
        hidden = hiding_all(profile)
        least_s = step_s([stage.passes(hidden, stage.copies(hidden, walked)) for stage in stages])
    return Priced(
        setting,
        tuple(stage.memory(own) for stage, own in zip(stages, copies, strict=True)),
        StepRange(least_s - _head_spared_s(job, profile, setting), most_s),
        max(stage.host_bytes for stage in stages),
        job.microbatches * max(sum(map(_steady_s, own)) for own in chunks),
    )


def _head_spared_s(job: Job, profile: Profile, setting: StockSetting) -> float:
    """At most: each takes as long as the head's forward, and the last stage's backwards are shorter by that."""
    return deferred_heads(job, setting) * head_of(profile, LayerShape.of(job).input_bytes).forward_s


def _steady_s(passes: ChunkPasses) -> float:
    return passes.forward["steady"].seconds + passes.backward["steady"].seconds


def schedule_of(job: Job, microbatches: int, more: int = 0) -> Schedule:
    """Megatron's schedule with flushes, of so many micro-batches. `more`: forwards beyond the usual before the first backward.
    The combined schedule has one, so that the two of a pair need nothing of each other."""
    if job.chunks > 1:
        return interleaved(job.parallel.pipeline, microbatches, job.chunks, job.microbatch_group, more)
    return one_f_one_b(job.parallel.pipeline, microbatches, more)


def least_bytes(job: Job, setting: StockSetting) -> int:
    """What the fullest device holds at least: copies take no time."""
    return max(memory.total for memory in of_every_stage(job, lambda stage: StockStage(job, setting, stage).least_memory()))
