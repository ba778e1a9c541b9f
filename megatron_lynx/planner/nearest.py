"""Finds what would fit: changes of a job that does not, and the load of experts with which a plan still does.

Of a job that does not fit: the fewest of these changes after which every stage's least memory does.

    exchanges of experts not overlapped -> offload_ratio: auto -> defer_updates: false -> distributed_optimizer
                  -> sequence_parallel -> smaller micro-batch -> longer pipeline -> tensor -> schedule: flush

Of equally many changes those that come first in this order are taken: they ask least of whoever launches the job. Changes that
need another profile are tried where the cluster is described well enough to make an analytic one.

The largest load of experts is said where twice the assumed load would not fit:

    bytes of the fullest moment     plan at the load it was made for ── plan at twice that load      what experts hold grows with
                                                   └── budget: in between, on a straight line        their rows, so no less fits

Routers do not keep to the load that a plan assumes; the runtime holds whatever comes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from functools import reduce
from itertools import combinations
from math import floor
from typing import Any

from pydantic import ValidationError

from megatron_lynx.anatomy import Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device, layers_budget_bytes
from megatron_lynx.cost.section import priced
from megatron_lynx.errors import Problem
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.planner.evaluation import peak_bytes
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile, shape_of
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.solver.stages import Stages

NEVER_MORE_TENSOR_RANKS = 8
"""Larger groups would span nodes, where tensor parallelism is too slow to help."""

MOST_AT_ONCE = 3


Changes = tuple[tuple[str, Any], ...]
"""Values of a job, by their places in it."""


def nearest_change(job: Job, profile: Profile, plannable: Callable[[Job, Profile], bool]) -> Iterator[Problem]:
    """One problem that names the changes, or none where nothing helps. `plannable`: whether a job has a plan, asked last."""
    chosen = fewest_changes(job, profile, plannable)
    if chosen is not None:
        yield Problem("nearest change that fits", in_words(chosen), "", "or raise the budget by what is missing")


def in_words(changes: Changes) -> str:
    """As a job file says them."""
    return ", ".join(f"{key}: {str(value).lower()}" for key, value in changes)


def fewest_changes(
    job: Job, profile: Profile, plannable: Callable[[Job, Profile], bool], without: Container[str] = ()
) -> Changes | None:
    """The changes; None where nothing helps. `without`: places that stay as they are."""
    known = [change for change in _changes(job) if change[0] not in without]
    for size in range(1, MOST_AT_ONCE + 1):
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
    """The job with these changes, or None where it would not be valid."""
    data = job.model_dump(by_alias=True)
    for key, value in changes:
        *path, last = key.split(".")
        reduce(lambda place, name: place[name], path, data)[last] = value
    try:
        return Job.model_validate(data)
    except ValidationError:
        return None


def _fitting(job: Job, profile: Profile) -> Profile | None:
    """A profile of the job, if it fits with everything replayed and offloaded that can be, else None."""
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


DOUBLED = 2.0

DIGITS = 100
"""A load is said in hundredths, rounded down."""


def loads_that_fit(job: Job, plan: Plan, profile: Profile, simulation: Simulation) -> list[float]:
    """The largest load of each stage's experts; 0 where it has none, nothing bounds it, or twice the load fits as well.

    `job`: with its layers. `simulation`: of the plan at the load it assumes.
    """
    if job.model.experts is None or not bounded_by_device(job) or job.cluster.matmul is None:
        return [0.0] * job.parallel.pipeline
    heavier = with_load(job, min(DOUBLED * job.model.moe_load, job.model.experts.most_load(job.parallel.expert)))
    if heavier.model.moe_load <= job.model.moe_load:
        return [0.0] * job.parallel.pipeline
    later, stages = rehearsed_with_load_of(heavier, plan, profile), range(job.parallel.pipeline)
    held = [(peak_bytes(job, simulation, stage), peak_bytes(heavier, later, stage)) for stage in stages]
    found = [_largest(job, heavier, *both) if job.experts_on(stage) else 0.0 for stage, both in enumerate(held)]
    return _held_to(job, plan, profile, found)


def _held_to(job: Job, plan: Plan, profile: Profile, loads: Sequence[float]) -> list[float]:
    """Loads of stages between two that were rehearsed, or the next lower ones at which they hold no more than they may: each
    stage is rehearsed at its own."""
    found = list(loads)
    asked = {stage for stage, load in enumerate(found) if load > job.model.moe_load}
    while asked:
        jobs = {stage: with_load(job, found[stage]) for stage in asked}
        loaded = {stage: _loaded(each, profile) for stage, each in jobs.items()}
        simulation = rehearse(plan, profile, job=job, loaded=loaded)
        for stage, each in jobs.items():
            if peak_bytes(each, simulation, stage) > job.memory_budget_bytes:
                found[stage] = round(found[stage] - 1 / DIGITS, 2)
        asked = {stage for stage in asked if job.model.moe_load < found[stage] < jobs[stage].model.moe_load}
    return found


def _largest(job: Job, heavier: Job, held_bytes: int, more_bytes: int) -> float:
    """The load at which a stage holds what its device has, between two loads of which it holds so much."""
    if more_bytes <= job.memory_budget_bytes:
        return 0.0
    share = max(0.0, (job.memory_budget_bytes - held_bytes) / (more_bytes - held_bytes))
    return _rounded_down(job.model.moe_load + share * (heavier.model.moe_load - job.model.moe_load))


def loads_of_falling_back(job: Job, plan: Plan, stage: Stage, profile: Profile, load: float) -> tuple[float, float]:
    """Of a stage whose bytes hold for `load`: the load beyond which its halves of experts fall back, and the one that then
    holds, because what is left of a row is less than what there was.

    Halves that run again what could be let go of hold more with every row whatever the others do, so these begin earlier.
    """
    heavier = with_load(job, DOUBLED * job.model.moe_load)
    profiles = profile, _loaded(heavier, profile)
    kept = left = always = 0
    for layer in job.model.expert_layers:
        if layer in stage.layers:
            rule, section = stage.rule_for(layer), plan.model.sections_of(layer)[-1]
            replay = {*rule.recomputed(section)}
            if rule.checkpoints(section.half):
                continue  # nothing of its rows stays
            with_rows = _of_rows_bytes(profiles, section, replay)
            if section.on_rows <= replay:
                always += with_rows
            else:
                kept, left = kept + with_rows, left + _of_rows_bytes(profiles, section, replay | section.on_rows)
    assert job.model.experts is not None, "asked only of jobs with experts"
    most = load * (kept + always)
    holds = min(most / (left + always), job.model.experts.most_load(job.parallel.expert))
    if not always:
        return load, _rounded_down(holds)
    holds = min(holds, DOUBLED * job.model.moe_load)
    begins = max(job.model.moe_load, (most - always * holds) / kept)
    return _rounded_down(begins), _rounded_down(min(holds, (most - kept * begins) / always))


def _rounded_down(load: float) -> float:
    return floor(DIGITS * load) / DIGITS


def _of_rows_bytes(profiles: tuple[Profile, Profile], section: Section, replay: Collection[str]) -> int:
    """What a half that replays these items keeps more with the rows of the second profile than with those of the first."""
    less, more = (priced(profile, section, sorted(replay)).memory.resident for profile in profiles)
    return more - less


def rehearsed_with_load_of(job: Job, plan: Plan, profile: Profile) -> Simulation:
    """A plan that was made for another load of experts than this job's."""
    loaded = plan.model_copy(update={"model": plan.model.model_copy(update={"moe_load": job.model.moe_load})})
    return rehearse(loaded, _loaded(job, profile), job=job)


def _loaded(job: Job, profile: Profile) -> Profile:
    """The profile with the load of this job."""
    shape = profile.shape.model_copy(update={"experts": job.model.experts})
    return profile.model_copy(update={"experts": analytic_profile(job).experts, "shape": shape})


def with_load(job: Job, load: float) -> Job:
    """The same job, whose fullest rank's experts get so many times their balanced share."""
    assert job.model.experts is not None, "asked only of jobs with experts"
    experts = job.model.experts.model_copy(update={"load": load, "holds": None})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})
