"""Memory of a stock setting on each stage (maximum over moments), and its simulated step.

Seconds are of forwards and backwards; gradient reduction and the optimizer's update are the same for all settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.step import StepRange, hiding_all
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.flushes import with_flushes
from megatron_lynx.schedule.schedule import Schedule
from megatron_lynx.simulator.passes import PASS_KINDS
from megatron_lynx.simulator.simulate import simulate
from megatron_lynx.simulator.simulation import Simulation, in_steady_state
from megatron_lynx.stock.setting import StockSetting
from megatron_lynx.stock.stage import StockStage, TimedStage, deferred_heads
from megatron_lynx.timeline import Passes

WALKED_GROUPS = 4
"""Copies are simulated for this many groups of micro-batches (one per stage); then every phase is in steady state."""


@dataclass(frozen=True)
class Priced:
    """Figures of a setting, each computed when first read."""

    job: Job
    profile: Profile
    setting: StockSetting

    @cached_property
    def stages(self) -> tuple[StageMemory, ...]:
        return tuple(stage.parts.fullest for stage in self._stages)

    @cached_property
    def most_bytes(self) -> int:
        return max(stage.total for stage in self.stages)

    @cached_property
    def host_bytes(self) -> int:
        """Page-locked memory of the rank with the most."""
        return max(stage.host_bytes for stage in self._stages)

    @cached_property
    def simulation(self) -> Simulation:
        """The forwards and backwards of a step; with userbuffers, of the longest."""
        return self._simulated(self._stages)

    @cached_property
    def step(self) -> StepRange:
        """Userbuffers hide an unknown part of the exchanges, and an unknown part of the head's deferred weight gradients runs
        while the last stage waits at the end of the step."""
        job, profile = self.job, self.profile
        most_s = least_s = self.simulation.step_s
        if job.userbuffers:
            least_s = self._simulated(self._timed(hiding_all(profile))).step_s
        # at most: a deferred weight gradient takes the seconds of the head's forward, which the last stage's backwards save
        spared_s = deferred_heads(job, self.setting) * profile.head.forward_s
        return StepRange(least_s - spared_s, most_s)

    @property
    def step_s(self) -> float:
        return self.step.expected_s

    def microbatch_s(self, stage: int) -> Passes:
        """Seconds of a micro-batch on a stage, after a backward."""
        chunks = self._stages[stage].passes
        return Passes(*(sum(chunk.one(kind, "steady").seconds for chunk in chunks) for kind in PASS_KINDS))

    def __getstate__(self) -> dict[str, Any]:
        """For another process: the figures that are known, without the passes and the simulation that they came from."""
        return {name: value for name, value in vars(self).items() if name not in ("_stages", "simulation")}

    def fits(self, budget_bytes: int) -> bool:
        return all(stage.parts.peak_bytes <= budget_bytes for stage in self._stages)

    @cached_property
    def _stages(self) -> list[TimedStage]:
        return self._timed(self.profile)

    def _timed(self, profile: Profile) -> list[TimedStage]:
        schedule = self._schedule(min(self.job.microbatches, WALKED_GROUPS * self.job.microbatch_group))
        return [TimedStage(self.job, self.setting, stage, profile, schedule) for stage in range(self.job.parallel.pipeline)]

    def _schedule(self, microbatches: int) -> Schedule:
        job = self.job
        return with_flushes(job.parallel.pipeline, microbatches, job.chunks, job.microbatch_group, int(self.setting.overlap))

    def _simulated(self, stages: Sequence[TimedStage]) -> Simulation:
        job, passes = self.job, [stage.passes for stage in stages]
        message_s = self.profile.link_s("p2p", LayerShape.of(job).input_bytes) if job.parallel.pipeline > 1 else 0.0

        def simulated(microbatches: int) -> Simulation:
            return simulate(self._schedule(microbatches), passes, message_s, between_passes=not job.overlap.messages)

        return in_steady_state(max(len(stages), job.microbatch_group), job.microbatches, simulated)


def priced(job: Job, profile: Profile, setting: StockSetting) -> Priced:
    """Return the setting's price. `profile`: the job's, analytic or measured."""
    return Priced(job.with_userbuffers(True) if setting.userbuffers and not job.userbuffers else job, profile, setting)


def memory_of_stages(job: Job, setting: StockSetting) -> Iterator[StageMemory]:
    """Memory of all stages, without copies in flight."""
    return (StockStage(job, setting, stage).parts.fullest for stage in range(job.parallel.pipeline))


def least_bytes(job: Job, setting: StockSetting) -> int:
    """Bytes of the fullest device if copies take no time."""
    return max(memory.total for memory in memory_of_stages(job, setting))
