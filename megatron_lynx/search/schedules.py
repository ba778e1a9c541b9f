"""A job simulated with and without flushes.

    stock none, stock full             Megatron's 1F1B        gradients of the newest weights
    ours, flush                        its plan               the same, bitwise
    no recomputation, ours: 2BW        without flushes        gradients are one update old, by design

A step is one batch with its update; without flushes, in steady state. `benchmarks.schedules` trains both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import as_planned, make_plan
from megatron_lynx.planner.evaluation import figures_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.simulated import pipeline_s


@dataclass(frozen=True)
class ScheduleRow:
    """One way to train. `step_s` includes the update; `memory_bytes`: of the fullest device, with both versions of weights."""

    setting: str
    without_flushes: bool
    step_s: float
    memory_bytes: int
    ratio_to_none: float = 1.0

    @property
    def gradients(self) -> str:
        return "one update old, by design" if self.without_flushes else "of the newest weights"

    @property
    def as_json(self) -> dict[str, Any]:
        equal = True if self.setting.startswith("stock") and not self.without_flushes else None
        return {**asdict(self), "gradient_age_updates": int(self.without_flushes), "gradients_equal": equal}


def side_by_side(job: Job, plan: Plan, profile: Profile) -> list[ScheduleRow]:
    """Return a row for each way. `plan` is the job's, without flushes."""
    rows = list(_rows(as_planned(job, plan), plan, profile))
    return [replace(row, ratio_to_none=row.step_s / rows[0].step_s) for row in rows]


def _rows(job: Job, plan: Plan, profile: Profile) -> Iterator[ScheduleRow]:
    flushing = job.model_copy(update={"schedule": "flush", "defer_updates": True})
    yield _of_policy(flushing, profile, "none", "stock none, flush")
    yield _of_policy(flushing, profile, "full", "stock full, flush")
    with suppress(Infeasible):
        yield _of_plan(flushing, profile, make_plan(flushing, profile), "ours, flush")
    yield _of_policy(job, profile, "none", "no recomputation, without flushes")
    yield _of_plan(job, profile, plan, "ours, without flushes")


def _of_policy(job: Job, profile: Profile, policy: Policy, name: str) -> ScheduleRow:
    policy_job = job.model_copy(update={"policy": policy, "offload_ratio": 0.0})
    memory_bytes = max(memory.total for memory in memory_of_stages(policy_job))
    return _row(name, job, pipeline_s(policy_job, profile), update_s(policy_job, profile), memory_bytes)


def _of_plan(job: Job, profile: Profile, plan: Plan, name: str) -> ScheduleRow:
    return _row(name, job, *figures_of(job, profile, rehearse(plan, profile, job=job)))


def _row(name: str, job: Job, batch_s: float, update_s: float, memory_bytes: int) -> ScheduleRow:
    return ScheduleRow(name, job.schedule == "double_buffered", batch_s + update_s, memory_bytes)
