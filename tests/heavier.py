"""Plans of models with experts, rehearsed with another load than they assume."""

from __future__ import annotations

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.loads import _loaded
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation


def rehearsed_with_load_of(job: Job, plan: Plan, profile: Profile) -> Simulation:
    loaded = plan.model_copy(update={"model": plan.model.model_copy(update={"moe_load": job.model.moe_load})})
    return rehearse(loaded, _loaded(job, profile), job=job)
