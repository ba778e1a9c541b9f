"""Loads of experts at which a finished plan still fits, and from which its expert halves fall back.

The largest load is stated if twice the assumed load would not fit. It is interpolated between the fullest moment's bytes at the
plan's load and at one that is too much, first twice that load, until it fits: bytes of experts grow with their rows. Routers
exceed the assumed load, and the runtime holds all rows that come.
"""

from __future__ import annotations

from collections.abc import Collection
from math import floor

from megatron_lynx.anatomy import Section
from megatron_lynx.config.experts import Experts
from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device
from megatron_lynx.cost.section import priced
from megatron_lynx.plan.features import may_fall_back
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.planner.evaluation import peak_bytes
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation


def with_loads(plan: Plan, job: Job, profile: Profile, simulation: Simulation) -> Plan:
    """Return the plan with the loads of each stage; without experts, without a bound, or if twice the load fits, they are 0.

    `job`: with its layers. `simulation`: of the plan at the load it assumes.
    """
    experts = job.model.experts
    if experts is None or not bounded_by_device(job) or job.cluster.matmul is None:
        return plan
    loads = loads_that_fit(job, experts, plan, profile, simulation)

    def stated(entry: Stage) -> Stage:
        load, hold, fallen = loads[entry.stage], None, 0.0
        if load and not experts.whole and may_fall_back(plan, entry):
            begins, holds = loads_of_falling_back(job, experts, plan, entry, profile, load)
            hold, fallen = (begins, holds) if holds > load else (None, 0.0)
        predicted = entry.predicted.model_copy(update={"moe_load": load, "moe_load_fallen_back": fallen})
        return entry.model_copy(update={"predicted": predicted, "experts_hold": hold})

    return plan.model_copy(update={"stages": tuple(map(stated, plan.stages))})


def loads_that_fit(job: Job, experts: Experts, plan: Plan, profile: Profile, simulation: Simulation) -> list[float]:
    """Return the largest load of each stage's experts; 0 if it has none, or if twice the load fits."""
    stages, usual = range(job.parallel.pipeline), job.model.moe_load
    held_bytes = [peak_bytes(job, simulation, stage) for stage in stages]
    most = min(2 * usual, experts.most_load(job.parallel.expert))
    loads = {stage: most for stage in stages if job.experts_on(stage)}
    while jobs := {stage: with_load(job, load) for stage, load in loads.items() if load > usual}:
        loaded = {stage: _loaded(heavier, profile) for stage, heavier in jobs.items()}
        simulation = rehearse(plan, profile, job=job, loaded=loaded)
        more_bytes = {stage: peak_bytes(heavier, simulation, stage) for stage, heavier in jobs.items()}
        over = [stage for stage, size in more_bytes.items() if size > job.memory_budget_bytes]
        for stage in over:
            between = _between(job, held_bytes[stage], loads[stage], more_bytes[stage])
            loads[stage] = min(between, round(loads[stage] - 0.01, 2))
        loads = {stage: load for stage, load in loads.items() if load < most}
        if not over:
            break
    return [loads.get(stage, 0.0) for stage in stages]


def _between(job: Job, held_bytes: int, load: float, more_bytes: int) -> float:
    """Interpolate the load at which a stage fills its device, between the job's load and one that is too much, by their bytes."""
    share = max(0.0, (job.memory_budget_bytes - held_bytes) / (more_bytes - held_bytes))
    return _rounded_down(job.model.moe_load + share * (load - job.model.moe_load))


def loads_of_falling_back(
    job: Job, experts: Experts, plan: Plan, stage: Stage, profile: Profile, load: float
) -> tuple[float, float]:
    """For a stage that fits at `load`, return the load from which its expert halves fall back, and the load at which it then
    fits, because a row then holds less.

    Halves that already recompute what falling back frees grow with each row, so the others begin earlier.
    """
    profiles = profile, _loaded(with_load(job, 2 * job.model.moe_load), profile)
    kept = left = always = 0
    for layer in {*stage.layers}.intersection(job.model.expert_layers):
        rule, section = stage.rule_for(layer), plan.model.sections_of(layer)[-1]
        if rule.checkpoints(section.half):
            continue  # its rows are freed
        recompute = {*rule.recomputed(section)}
        rows_bytes, fallen_bytes = (_rows_bytes(profiles, section, items) for items in (recompute, recompute | section.on_rows))
        if section.on_rows <= recompute:
            always += rows_bytes
        else:
            kept, left = kept + rows_bytes, left + fallen_bytes
    room_bytes = load * (kept + always)
    holds = min(room_bytes / (left + always), experts.most_load(job.parallel.expert))
    if not always:
        return load, _rounded_down(holds)
    holds = min(holds, 2 * job.model.moe_load)
    begins = max(job.model.moe_load, (room_bytes - always * holds) / kept)
    return _rounded_down(begins), _rounded_down(min(holds, (room_bytes - kept * begins) / always))


def _rounded_down(load: float) -> float:
    return floor(100 * load) / 100


def _rows_bytes(profiles: tuple[Profile, Profile], section: Section, recompute: Collection[str]) -> int:
    """Additional bytes of a half that recomputes these items, with the rows of the second profile."""
    less, more = (priced(profile, section, sorted(recompute)).memory.resident for profile in profiles)
    return more - less


def _loaded(job: Job, profile: Profile) -> Profile:
    shape = profile.shape.model_copy(update={"experts": job.model.experts})
    return profile.model_copy(update={"experts": analytic_profile(job).experts, "shape": shape})


def with_load(job: Job, load: float) -> Job:
    """Return the job with this load: its fullest rank's rows over the balanced share."""
    assert job.model.experts is not None, "asked only of jobs with experts"
    experts = job.model.experts.model_copy(update={"load": load, "holds": None})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})
