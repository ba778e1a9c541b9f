"""Makes a plan, or finds changes after which an infeasible job fits.

The fewest of these changes after which every stage's least memory fits; of equally many, the first in this order, which is the
easiest for a launch:

    exchanges of experts not overlapped -> no whole micro-batches -> offload_ratio: auto -> defer_updates: false
        -> distributed_optimizer -> sequence_parallel -> smaller micro-batch -> longer pipeline -> tensor -> schedule: flush

Changes that need another profile are tried if the cluster is described well enough for an analytic one.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import reduce
from itertools import chain, combinations
from math import ceil
from typing import Any, NamedTuple

from pydantic import ValidationError

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.decision import Decision, fastest_decision, leanest, plannable
from megatron_lynx.planner.left_open import with_least_memory, with_pieces
from megatron_lynx.planner.partitioning import partitioned
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile, shape_of
from megatron_lynx.solver.stages import Stages
from megatron_lynx.units import GIB, format_bytes

Changes = tuple[tuple[str, Any], ...]
"""(key of the job, value)."""


def make_plan(job: Job, profile: Profile) -> Plan:
    return decide(job, profile).plan


def decide(job: Job, profile: Profile) -> Decision:
    """Return the decision for a job's policy: the fastest plan within the budget (`cost.budget`); on the testbed without a stated
    budget, the plan with the least memory.

    Raises `ConfigError` if the profile has another shape or no plan can express the job, `Infeasible` if no choice fits (with
    each stage's binding limit, the excess, and the nearest change that fits), and `PlannerFault` if a finished plan exceeds its
    budget, which is an error of ours.
    """
    try:
        return fastest_decision(job, profile)
    except Infeasible as error:
        raise Infeasible(error.headline, [*error.problems, *_changes_that_fit(with_least_memory(job), profile)]) from None


def _changes_that_fit(job: Job, profile: Profile) -> Iterator[Problem]:
    """Yield the smallest budget with a plan if the device's memory binds, the nearest other change, and an inexact one."""
    if bounded_by_device(job):
        yield from _smallest_budget(job, profile)
    if (found := fewest_changes(job, profile)) is not None:
        yield Problem("nearest change that fits", found.in_words, "", "or raise the budget by what is missing")
    pieced = with_pieces(job) if job.head is None else None
    if pieced is not None and plannable(pieced, profile):
        todo = "plan with --inexact head: the gradient of one weight is then another sum (docs/plan_file.md)"
        yield Problem("inexact change that fits", f"head.pieces: {pieced.head_pieces}", "", todo)


def _smallest_budget(job: Job, profile: Profile) -> Iterator[Problem]:
    least_gib = leanest(partitioned(job, profile)[0].job, profile).memory_bytes / GIB
    tried = [(("budget.memory_gib", float(ceil(part * least_gib))),) for part in (1, 1.02, 1.1)]
    if (found := first_that_fits(job, profile, tried)) is not None:
        card_bytes = job.device_reserve.left_bytes
        has = f"{job.cluster.name} has {format_bytes(card_bytes)} of it"
        if found.job.memory_budget_bytes > card_bytes:
            has += ": share the model among more ranks (tensor, pipeline), or use more GPUs"
        yield Problem("smallest budget with a plan", f"--memory-gib {found.job.budget.memory_gib:g}", "", has)


class Found(NamedTuple):
    job: Job
    """With the changes."""
    in_words: str


def fewest_changes(job: Job, profile: Profile, without: Container[str] = ()) -> Found | None:
    """`without`: keys that must not change."""
    known = [change for change in _changes(job) if change[0] not in without]
    tried = chain.from_iterable(combinations(known, size) for size in (1, 2, 3))
    return first_that_fits(job, profile, tried, by_least=job.parallel.partition != "auto")


def first_that_fits(job: Job, profile: Profile, tried: Iterable[Changes], *, by_least: bool = False) -> Found | None:
    """Return the first of these changes with which the job is valid and has a plan that fits.

    `by_least`: those whose least memory is too much are not planned, which is faster.
    """
    for changes in tried:
        if (changed := with_changes(job, changes)) is None:
            continue
        measured = shape_of(changed) == profile.shape
        if measured or job.cluster.matmul is not None:
            costs = profile if measured else analytic_profile(changed)
            fits = not by_least or all(map(Stages(changed, costs).least_fits, range(changed.parallel.pipeline)))
            if fits and plannable(changed, costs):
                return Found(changed, ", ".join(f"{key}: {str(value).lower()}" for key, value in changes))
    return None


def _changes(job: Job) -> Iterator[tuple[str, Any]]:
    layout, micro, pipeline = job.parallel, job.batch.micro, job.parallel.pipeline
    if job.model.moe_overlapped:
        yield "model.experts.overlapped", False
    if job.whole_microbatches != 0:
        yield "whole_microbatches", 0
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
    if job.cluster.keeps_together(2 * layout.tensor, job.gpus):  # between nodes it is too slow
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
