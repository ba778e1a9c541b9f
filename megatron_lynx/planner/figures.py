"""A plan's figures: seconds of a whole step under it, and bytes of the fullest device. Every command prints these.

job, profile, simulation ──> passes_s + update_s = step_s
                         └──> memory_bytes (`planner.held`)
"""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_lynx.config.job import Job
from megatron_lynx.cost.update import update_s
from megatron_lynx.planner.held import fullest_bytes
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.simulator.simulation import Simulation


class PlanFigures(NamedTuple):
    """What a plan takes and holds."""

    passes_s: float
    """Forwards and backwards of a step, over all stages."""
    update_s: float
    """Reducing gradients and updating parameters, as far as that makes the step longer."""
    memory_bytes: int

    @property
    def step_s(self) -> float:
        return self.passes_s + self.update_s

    @property
    def as_json(self) -> dict[str, Any]:
        return {"step_s": self.step_s, "update_s": self.update_s, "memory_bytes": self.memory_bytes}


def figures_of(job: Job, profile: Profile, simulation: Simulation) -> PlanFigures:
    """`job`: with the layers of every stage, as the plan has them. `simulation`: the plan's rehearsal with this profile."""
    return PlanFigures(simulation.step_s, update_s(job, profile), fullest_bytes(job, simulation))
