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
from functools import partial
from typing import Any

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host import issued
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.step import recomputing_stage_s
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import as_planned, make_plan
from megatron_lynx.planner.evaluation import figures_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.double_buffered import simulate_without_flushes
from megatron_lynx.simulator.passes import plain_passes
from megatron_lynx.simulator.simulation import in_steady_state
from megatron_lynx.stock import FULL, NONE, StockSetting, priced


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
    yield _of_stock(flushing, profile, NONE)
    yield _of_stock(flushing, profile, FULL)
    with suppress(Infeasible):
        yield _of_plan(flushing, profile, make_plan(flushing, profile), "ours, flush")
    kept = job.model_copy(update={"policy": "none", "offload_ratio": 0.0})
    kept_bytes = max(memory.total for memory in memory_of_stages(kept))
    name = "no recomputation, without flushes"
    yield ScheduleRow(name, True, without_flushes_s(kept, profile) + update_s(kept, profile), kept_bytes)
    yield _of_plan(job, profile, plan, "ours, without flushes")


def _of_stock(job: Job, profile: Profile, setting: StockSetting) -> ScheduleRow:
    price = priced(job.model_copy(update={"policy": "none", "offload_ratio": 0.0}), profile, setting)
    return ScheduleRow(f"stock {setting.name}, flush", False, price.step_s + update_s(job, profile), price.most_bytes)


def _of_plan(job: Job, profile: Profile, plan: Plan, name: str) -> ScheduleRow:
    figures = figures_of(job, profile, rehearse(plan, profile, job=job))
    return ScheduleRow(name, job.schedule == "double_buffered", figures.step_s, figures.memory_bytes)


def without_flushes_s(job: Job, profile: Profile) -> float:
    """Seconds of forwards and backwards of a batch without flushes under the job's policy, which is not `planned`."""
    stages = range(job.parallel.pipeline)
    seconds = [issued(recomputing_stage_s(job, profile, stage), job, profile, stage) for stage in stages]
    passes = [plain_passes(stage_s.forward_s, stage_s.backward_s) for stage_s in seconds]
    message_s = profile.link_s("p2p", LayerShape.of(job).input_bytes) if len(stages) > 1 else 0.0
    simulated = partial(simulate_without_flushes, chunks=passes, p2p_s=message_s, deferred=job.defer_updates)
    return in_steady_state(len(stages), job.microbatches, simulated).step_s
