"""A job with and without flushes, side by side: simulated, and trained where this machine can be the job's cluster.

    stock none, stock full       Megatron's 1F1B                             gradients of the newest weights
    ours, flush                  the plan for it                             the same, to the bit (`compare` of that job says so)
    no recomputation, 2BW        without flushes                             one update old, by design: not stock's, but equal to
    ours, 2BW                    the job's plan                              the bit to the version rule's (checked on ranks)

Steps are one batch with its update; without flushes, one in the steady state.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import as_planned, make_plan
from megatron_lynx.planner.figures import figures_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.simulated import pipeline_s
from megatron_lynx.testbed.candidates import FULL
from megatron_lynx.testbed.comparison import Announce
from megatron_lynx.testbed.hosts import Hosts
from megatron_lynx.testbed.schedules import Timed, Way, differing, time_ways

BATCHES = 6
"""Batches of a timed run. The first two and the last do not count."""
BATCHES_COMPARED = 4


@dataclass(frozen=True)
class ScheduleRow:
    """One way to train. Without training there are no measured seconds; ways that flush need no check of versions."""

    setting: str
    without_flushes: bool
    predicted_s: float
    measured_s: float | None
    ratio_to_none: float
    """The ratio of measured seconds; of predicted ones where nothing was measured."""
    memory_bytes: int
    """Memory of the fullest device, with the second version of the weights and the second gradient buffer."""
    equals_version_rule: bool | None

    @property
    def gradients(self) -> str:
        """How old the gradients are, and whether they were checked."""
        if not self.without_flushes:
            return "of the newest weights"
        said = {True: "as the version rule has it", False: "NOT as the version rule has it", None: "not checked"}
        return f"one update old, by design; {said[self.equals_version_rule]}"

    @property
    def as_json(self) -> dict[str, Any]:
        equal = None if self.without_flushes else True
        return {
            **asdict(self),
            "step_s": self.predicted_s if self.measured_s is None else self.measured_s,
            "gradient_age_updates": int(self.without_flushes),
            "gradients_equal": equal if self.setting.startswith("stock") else None,
        }


@dataclass(frozen=True)
class _Predicted:
    way: Way
    step_s: float
    """Seconds of a step without its update."""
    update_s: float
    memory_bytes: int


def side_by_side(job: Job, plan: Plan, profile: Profile) -> list[ScheduleRow]:
    """A row for each way, from simulation alone. `plan` is the job's, without flushes."""
    ways = list(_ways(job, plan, profile))
    return [_row(each, ways[0], None, None) for each in ways]


def trained_side_by_side(
    job: Job, plan: Plan, profile: Profile, hosts: Hosts, announce: Announce, *, rounds: int = 3
) -> list[ScheduleRow]:
    """The same, and trained on ranks of this machine; seconds of updates are measured, too."""
    ways = list(_ways(job, plan, profile))
    flushing = with_flushes(as_planned(job, plan))
    with announce("comparing weights with the version rule's"):
        equal = {
            each.way.name: not any(hosts.run(differing, flushing, each.way, BATCHES_COMPARED, unshaped=True))
            for each in ways
            if each.way.defers is not None
        }
    with announce(f"timing {len(ways)} ways, {rounds} rounds of {BATCHES} batches"):
        ranks: list[dict[str, Timed]] = hosts.run(time_ways, flushing, [each.way for each in ways], rounds, BATCHES)
    return [_row(each, ways[0], ranks, equal) for each in ways]


def with_flushes(job: Job) -> Job:
    """The same job under Megatron's own schedule. A `Way` says how it is trained otherwise."""
    return job.model_copy(update={"schedule": "flush", "defer_updates": True})


def _ways(job: Job, plan: Plan, profile: Profile) -> Iterator[_Predicted]:
    job = as_planned(job, plan)
    flushing = with_flushes(job)
    yield _of_policy(flushing, profile, "none", Way("stock none, flush"))
    yield _of_policy(flushing, profile, "full", Way("stock full, flush", fields=FULL.fields))
    with suppress(Infeasible):  # nobody asked for it
        yield _of_plan(flushing, profile, Way("ours, flush", plan=make_plan(flushing, profile)))
    yield _of_policy(job, profile, "none", Way("no recomputation, without flushes", job.defer_updates))
    yield _of_plan(job, profile, Way("ours, without flushes", job.defer_updates, plan))


def _of_policy(job: Job, profile: Profile, policy: Policy, way: Way) -> _Predicted:
    own = job.model_copy(update={"policy": policy, "offload_ratio": 0.0})
    memory_bytes = max(memory.total for memory in memory_of_stages(own))
    return _Predicted(way, pipeline_s(own, profile, 0.0), update_s(own, profile), memory_bytes)


def _of_plan(job: Job, profile: Profile, way: Way) -> _Predicted:
    assert way.plan is not None
    simulation = rehearse(way.plan, profile, job=job)
    return _Predicted(way, *figures_of(job, profile, simulation))


def _row(
    own: _Predicted, none: _Predicted, ranks: Sequence[dict[str, Timed]] | None, equal: dict[str, bool] | None
) -> ScheduleRow:
    name = own.way.name
    measured_s = None if ranks is None else statistics.median(ranks[0][name].batch_s)
    none_s = _seconds(none, ranks) if ranks is None else statistics.median(ranks[0][none.way.name].batch_s)
    return ScheduleRow(
        setting=name,
        without_flushes=own.way.defers is not None,
        predicted_s=_seconds(own, ranks),
        measured_s=measured_s,
        ratio_to_none=(_seconds(own, ranks) if measured_s is None else measured_s) / none_s,
        memory_bytes=own.memory_bytes,
        equals_version_rule=None if equal is None else equal.get(name),
    )


def _seconds(own: _Predicted, ranks: Sequence[dict[str, Timed]] | None) -> float:
    return own.step_s + (own.update_s if ranks is None else max(rank[own.way.name].update_s for rank in ranks))
