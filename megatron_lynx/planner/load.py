"""The largest load of experts with which a plan still fits: said where twice the assumed load would not.

    bytes of the fullest moment     plan at the load it was made for ── plan at twice that load      what experts hold grows with
                                                   └── budget: in between, on a straight line        their rows, so no less fits

Routers do not keep to the load that a plan assumes; the runtime holds whatever comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.writing import device_memory
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.answer import StageAnswer

DOUBLED = 2.0

DIGITS = 100
"""A load is said in hundredths, rounded down."""


def loads_that_fit(job: Job, answers: Sequence[StageAnswer], plan: Plan, profile: Profile, simulation: Simulation) -> list[float]:
    """The largest load of each stage's experts; 0 where it has none, nothing bounds it, or twice the load fits as well.

    `job`: with its layers. `simulation`: of the plan at the load it assumes.
    """
    if job.model.experts is None or not bounded_by_device(job) or job.cluster.matmul is None:
        return [0.0] * len(answers)
    heavier = with_load(job, min(DOUBLED * job.model.moe_load, job.model.experts.most_load(job.parallel.expert)))
    if heavier.model.moe_load <= job.model.moe_load:
        return [0.0] * len(answers)
    later = _rehearsed(heavier, plan, profile)
    held = [(_held_bytes(job, each, simulation), _held_bytes(heavier, each, later)) for each in answers]
    return [_largest(job, heavier, *both) if job.experts_on(stage) else 0.0 for stage, both in enumerate(held)]


def _largest(job: Job, heavier: Job, held_bytes: int, more_bytes: int) -> float:
    """The load at which a stage holds what its device has, between two loads of which it holds so much."""
    if more_bytes <= job.memory_budget_bytes:
        return 0.0
    share = max(0.0, (job.memory_budget_bytes - held_bytes) / (more_bytes - held_bytes))
    return floor(DIGITS * (job.model.moe_load + share * (heavier.model.moe_load - job.model.moe_load))) / DIGITS


def _rehearsed(job: Job, plan: Plan, profile: Profile) -> Simulation:
    """The plan with the load of this job."""
    shape = profile.shape.model_copy(update={"experts": job.model.experts})
    loaded = profile.model_copy(update={"experts": analytic_profile(job).experts, "shape": shape})
    return rehearse(plan.model_copy(update={"model": plan.model.model_copy(update={"moe_load": job.model.moe_load})}), loaded)


def with_load(job: Job, load: float) -> Job:
    """The same job, whose fullest rank's experts get so many times their balanced share."""
    assert job.model.experts is not None, "asked only of jobs with experts"
    experts = job.model.experts.model_copy(update={"load": load})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})


def _held_bytes(job: Job, answer: StageAnswer, simulation: Simulation) -> int:
    return device_memory(job, answer, simulation.memory(answer.stage).peak_bytes).total
