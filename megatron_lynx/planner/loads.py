"""Loads of experts at which a finished plan still fits, and from which its expert halves fall back.

The largest load is stated if twice the assumed load would not fit. It is interpolated between the fullest moment's bytes at the
plan's load and at twice that load: bytes of experts grow with their rows. Routers exceed the assumed load, and the runtime holds
all rows that come.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import floor

from megatron_lynx.anatomy import Section
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

DIGITS = 100
"""Loads are hundredths, rounded down."""


def with_loads(plan: Plan, job: Job, profile: Profile, simulation: Simulation) -> Plan:
    """Return the plan with the loads of each stage. `job`: with its layers. `simulation`: of the plan."""
    loads, experts = loads_that_fit(job, plan, profile, simulation), job.model.experts

    def stated(entry: Stage) -> Stage:
        load, fallen = loads[entry.stage], 0.0
        hold: float | None = None
        if load and experts is not None and not experts.whole and may_fall_back(plan, entry):
            hold, fallen = loads_of_falling_back(job, plan, entry, profile, load)
            hold, fallen = (hold, fallen) if fallen > load else (None, 0.0)
        predicted = entry.predicted.model_copy(update={"moe_load": load, "moe_load_fallen_back": fallen})
        return entry.model_copy(update={"predicted": predicted, "experts_hold": hold})

    return plan.model_copy(update={"stages": tuple(map(stated, plan.stages))})


def loads_that_fit(job: Job, plan: Plan, profile: Profile, simulation: Simulation) -> list[float]:
    """Return the largest load of each stage's experts; 0 without experts, without a bound, or if twice the load fits.

    `job`: with its layers. `simulation`: of the plan at the load it assumes.
    """
    if job.model.experts is None or not bounded_by_device(job) or job.cluster.matmul is None:
        return [0.0] * job.parallel.pipeline
    heavier = with_load(job, min(2 * job.model.moe_load, job.model.experts.most_load(job.parallel.expert)))
    if heavier.model.moe_load <= job.model.moe_load:
        return [0.0] * job.parallel.pipeline
    later, stages = rehearsed_with_load_of(heavier, plan, profile), range(job.parallel.pipeline)
    held = [(peak_bytes(job, simulation, stage), peak_bytes(heavier, later, stage)) for stage in stages]
    loads = [_largest(job, heavier, *peaks_bytes) if job.experts_on(stage) else 0.0 for stage, peaks_bytes in enumerate(held)]
    return _held_to(job, plan, profile, loads)


def _held_to(job: Job, plan: Plan, profile: Profile, loads: Sequence[float]) -> list[float]:
    """Lower the loads at which stages do not fit when rehearsed."""
    lowered_loads = list(loads)
    asked = {stage for stage, load in enumerate(lowered_loads) if load > job.model.moe_load}
    while asked:
        jobs = {stage: with_load(job, lowered_loads[stage]) for stage in asked}
        loaded = {stage: _loaded(stage_job, profile) for stage, stage_job in jobs.items()}
        simulation = rehearse(plan, profile, job=job, loaded=loaded)
        for stage, stage_job in jobs.items():
            if peak_bytes(stage_job, simulation, stage) > job.memory_budget_bytes:
                lowered_loads[stage] = round(lowered_loads[stage] - 1 / DIGITS, 2)
        asked = {stage for stage in asked if job.model.moe_load < lowered_loads[stage] < jobs[stage].model.moe_load}
    return lowered_loads


def _largest(job: Job, heavier: Job, held_bytes: int, more_bytes: int) -> float:
    """Interpolate the load at which a stage fills its device, between two loads and their bytes."""
    if more_bytes <= job.memory_budget_bytes:
        return 0.0
    share = max(0.0, (job.memory_budget_bytes - held_bytes) / (more_bytes - held_bytes))
    return _rounded_down(job.model.moe_load + share * (heavier.model.moe_load - job.model.moe_load))


def loads_of_falling_back(job: Job, plan: Plan, stage: Stage, profile: Profile, load: float) -> tuple[float, float]:
    """For a stage that fits at `load`, return the load from which its expert halves fall back, and the load at which it then
    fits, because a row then holds less.

    Halves that already recompute what falling back frees grow with each row, so the others begin earlier.
    """
    heavier = with_load(job, 2 * job.model.moe_load)
    profiles = profile, _loaded(heavier, profile)
    kept = left = always = 0
    for layer in job.model.expert_layers:
        if layer in stage.layers:
            rule, section = stage.rule_for(layer), plan.model.sections_of(layer)[-1]
            recompute = {*rule.recomputed(section)}
            if rule.checkpoints(section.half):
                continue  # its rows are freed
            with_rows = _of_rows_bytes(profiles, section, recompute)
            if section.on_rows <= recompute:
                always += with_rows
            else:
                kept, left = kept + with_rows, left + _of_rows_bytes(profiles, section, recompute | section.on_rows)
    assert job.model.experts is not None, "asked only of jobs with experts"
    room_bytes = load * (kept + always)
    holds = min(room_bytes / (left + always), job.model.experts.most_load(job.parallel.expert))
    if not always:
        return load, _rounded_down(holds)
    holds = min(holds, 2 * job.model.moe_load)
    begins = max(job.model.moe_load, (room_bytes - always * holds) / kept)
    return _rounded_down(begins), _rounded_down(min(holds, (room_bytes - kept * begins) / always))


def _rounded_down(load: float) -> float:
    return floor(DIGITS * load) / DIGITS


def _of_rows_bytes(profiles: tuple[Profile, Profile], section: Section, recompute: Collection[str]) -> int:
    """Additional bytes of a half that recomputes these items, with the rows of the second profile."""
    less, more = (priced(profile, section, sorted(recompute)).memory.resident for profile in profiles)
    return more - less


def rehearsed_with_load_of(job: Job, plan: Plan, profile: Profile) -> Simulation:
    loaded = plan.model_copy(update={"model": plan.model.model_copy(update={"moe_load": job.model.moe_load})})
    return rehearse(loaded, _loaded(job, profile), job=job)


def _loaded(job: Job, profile: Profile) -> Profile:
    shape = profile.shape.model_copy(update={"experts": job.model.experts})
    return profile.model_copy(update={"experts": analytic_profile(job).experts, "shape": shape})


def with_load(job: Job, load: float) -> Job:
    """Return the job with this load: its fullest rank's rows over the balanced share."""
    assert job.model.experts is not None, "asked only of jobs with experts"
    experts = job.model.experts.model_copy(update={"load": load, "holds": None})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})
