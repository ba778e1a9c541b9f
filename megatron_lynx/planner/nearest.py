"""Finds changes after which an infeasible job fits, and the load of experts at which a plan still fits.

The fewest of these changes after which every stage's least memory fits; of equally many, the first in this order, which is the
easiest for a launch:

    exchanges of experts not overlapped -> offload_ratio: auto -> defer_updates: false -> distributed_optimizer
                  -> sequence_parallel -> smaller micro-batch -> longer pipeline -> tensor -> schedule: flush

Changes that need another profile are tried if the cluster is described well enough for an analytic one.

The largest load of experts is stated if twice the assumed load would not fit. It is interpolated between the fullest moment's
bytes at the plan's load and at twice that load: bytes of experts grow with their rows. Routers exceed the assumed load, and the
runtime holds all rows that come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import reduce
from itertools import combinations
from math import ceil, floor
from typing import Any

from pydantic import ValidationError

from megatron_lynx.anatomy import Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device, layers_budget_bytes
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.section import priced
from megatron_lynx.errors import Problem
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.planner.evaluation import peak_bytes
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile, shape_of
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.stages import Stages
from megatron_lynx.units import GIB, format_bytes

NEVER_MORE_TENSOR_RANKS = 8
"""Larger groups would span nodes, where tensor parallelism is too slow."""

Changes = tuple[tuple[str, Any], ...]
"""(key of the job, value)."""


def nearest_change(job: Job, profile: Profile, plannable: Callable[[Job, Profile], bool]) -> Iterator[Problem]:
    """Yield one problem with the changes, or none if nothing helps. `plannable`: whether a job has a plan; called last."""
    chosen = fewest_changes(job, profile, plannable)
    if chosen is not None:
        yield Problem("nearest change that fits", in_words(chosen), "", "or raise the budget by what is missing")


def smallest_budget(
    job: Job, profile: Profile, least: Iterable[StageMemory], plannable: Callable[[Job, Profile], bool]
) -> Iterator[Problem]:
    """Yield one problem with the option to type, or none if the device's memory does not bind. `least`: of each stage."""
    if not bounded_by_device(job):
        return
    least_gib = max(memory.total for memory in least) / GIB
    for gib in (ceil(least_gib), ceil(1.02 * least_gib), ceil(1.1 * least_gib)):
        asked = with_changes(job, [("budget.memory_gib", float(gib))])
        if asked is not None and plannable(asked, profile):
            budget = job.budget.model_copy(update={"memory_gib": None})
            card_bytes = job.model_copy(update={"budget": budget}).memory_budget_bytes
            has = f"{job.cluster.name} has {format_bytes(card_bytes)} of it"
            more = (
                f"{has}: share the model among more ranks (tensor, pipeline), or use more GPUs" if gib * GIB > card_bytes else has
            )
            yield Problem("smallest budget with a plan", f"--memory-gib {gib}", "", more)
            return


def in_words(changes: Changes) -> str:
    return ", ".join(f"{key}: {str(value).lower()}" for key, value in changes)


def fewest_changes(
    job: Job, profile: Profile, plannable: Callable[[Job, Profile], bool], without: Container[str] = ()
) -> Changes | None:
    """Return the changes, or None if nothing helps. `without`: keys that must not change."""
    known = [change for change in _changes(job) if change[0] not in without]
    for size in (1, 2, 3):
        for chosen in combinations(known, size):
            changed = with_changes(job, chosen)
            if changed is not None and (costs := _fitting(changed, profile)) and plannable(changed, costs):
                return chosen
    return None


def _changes(job: Job) -> Iterator[tuple[str, Any]]:
    layout, micro, pipeline = job.parallel, job.batch.micro, job.parallel.pipeline
    if job.model.moe_overlapped:
        yield "model.experts.overlapped", False
    if job.offload_ratio != "auto" and job.policy == "planned":
        yield "offload_ratio", "auto"
    if job.schedule == "double_buffered" and job.defer_updates:
        yield "defer_updates", False
    if not layout.distributed_optimizer and job.replicas > 1:
        yield "parallel.distributed_optimizer", True
    if not layout.sequence_parallel and layout.tensor > 1:
        yield "parallel.sequence_parallel", True
    while micro % 2 == 0:
        micro //= 2
        yield "batch.micro", micro
    while (pipeline := 2 * pipeline) <= min(job.model.layers, job.gpus):
        yield "parallel.pipeline", pipeline
    if 2 * layout.tensor <= NEVER_MORE_TENSOR_RANKS:
        yield "parallel.tensor", 2 * layout.tensor
    if job.schedule == "double_buffered":
        yield "schedule", "flush"


def with_changes(job: Job, changes: Iterable[tuple[str, Any]]) -> Job | None:
    """Return the job with these changes, or None if it is invalid."""
    data = job.model_dump(by_alias=True)
    for key, value in changes:
        *path, last = key.split(".")
        reduce(lambda place, name: place[name], path, data)[last] = value
    try:
        return Job.model_validate(data)
    except ValidationError:
        return None


def _fitting(job: Job, profile: Profile) -> Profile | None:
    """Return a profile of the job if it fits with everything recomputed and offloaded that can be, else None."""
    budgets = [layers_budget_bytes(job, stage) for stage in range(job.parallel.pipeline)]
    if any(budget is not None and budget <= 0 for budget in budgets):
        return None
    if shape_of(job) != profile.shape:
        if job.cluster.matmul is None:
            return None
        profile = analytic_profile(job)
    stages = Stages(job, profile)
    fits = all(budget is None or stages.least(stage).peak_bytes <= budget for stage, budget in enumerate(budgets))
    return profile if fits else None


DIGITS = 100
"""Loads are hundredths, rounded down."""


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
