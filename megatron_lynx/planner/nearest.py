"""Finds what to change in a job that does not fit: the fewest of these changes after which every stage's least memory fits.

    offload_ratio: auto -> defer_updates: false -> distributed_optimizer -> sequence_parallel -> smaller micro-batch
                  -> longer pipeline -> tensor -> schedule: flush

Of equally many changes those that come first in this order are taken: they ask least of whoever launches the job. Changes that
need another profile are tried where the cluster is described well enough to make an analytic one.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from itertools import combinations
from typing import Any

from pydantic import ValidationError

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import layers_budget_bytes
from megatron_lynx.errors import Problem
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile, shape_of
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
        found = ", ".join(f"{key}: {str(value).lower()}" for key, value in chosen)
        yield Problem("nearest change that fits", found, "", "or raise the budget by what is missing")


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
        place = data[path[0]] if path else data
        place[last] = value
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
