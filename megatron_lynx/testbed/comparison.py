"""Compares a plan with stock Megatron on ranks of this machine.

census   bytes of every candidate, and whether its gradients equal stock's (unshaped link)
field    none, selective, full, stock settings of no more bytes than ours, and our candidates
race     seconds of the field in turns on the job's link, and a traced step of each plan
  └────> Measurement (table, verdict) and Timeline (picture, trace)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.measure.measurement import Measurement, RankResult, Setting, Skipped, this_machine
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.checks import check_plan
from megatron_lynx.testbed.candidates import FULL, NONE, SELECTIVE, Candidate
from megatron_lynx.testbed.fusions import deferring_job
from megatron_lynx.testbed.ranks import Hosts
from megatron_lynx.testbed.subject import Census, Counted, Lap, race, take_census
from megatron_lynx.timeline import Timeline, timeline_of
from megatron_lynx.units import format_bytes

MOST_OPPONENTS = 3
"""Opponents timed besides stock full: those that recompute least among settings of no more bytes than ours."""

Announce = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Comparison:
    measurement: Measurement
    timeline: Timeline
    """One step of every rank under the plan."""

    @property
    def gradients_equal(self) -> bool:
        return all(setting.gradients_equal for setting in self.measurement.settings if setting.ours)


def compare(
    job: Job, plan: Plan, hosts: Hosts, announce: Announce, *, rounds: int = 5, warmups: int = 1, module_sets: bool = True
) -> Comparison:
    """Train a few steps under every setting. `hosts`: where the ranks run; `module_sets`: whether to include stock's module sets.

    Raises `PlanMismatch`, `HookRefused` or another error of this package, or `RankError` for other errors on a rank.
    """
    check_plan(job, plan)
    if any(entry.defers for entry in plan.stages):
        job = deferring_job(job)  # stock accumulates weight gradients in place as well
    with announce("counting what every setting holds, comparing gradients"):
        censuses = hosts.run(take_census, job, plan, module_sets, unshaped=True)
    field = field_of(censuses[0])
    with announce(f"timing {len(field)} settings, {warmups + rounds} rounds"):
        laps = hosts.run(race, job, [counted.candidate for counted in field], rounds, warmups)
    settings = tuple(_setting(counted.candidate, censuses, laps) for counted in field)
    measurement = Measurement(
        subject=subject_of(job),
        machine=this_machine(hosts.links, hosts.device),
        device=hosts.device,
        warmups=warmups,
        settings=settings,
        skipped=(*left_out_of(censuses[0], field), *censuses[0].skipped),
    )
    return Comparison(measurement, timeline_of({rank: lap["ours"].events for rank, lap in enumerate(laps)}))


def subject_of(job: Job) -> str:
    model, parallel = job.model, job.parallel
    kind = "Llama-like" if model.activation == "swiglu" else "GPT-like"
    sequence = " with sequence parallelism" if parallel.sequence_parallel else ""
    layout = f"tensor {parallel.tensor}{sequence}, pipeline {parallel.pipeline}"
    return (
        f"{kind} model, {model.layers} layers of {model.hidden}, sequence {model.seq}; {layout}; "
        f"{job.microbatches} x {job.batch.micro} sequences a step"
    )


def field_of(census: Census) -> list[Counted]:
    ours = [counted for counted in census.counted if counted.candidate.ours]
    always = [census.of(candidate.name) for candidate in (NONE, SELECTIVE, FULL)]
    return [*always, *_opponents(census)[:MOST_OPPONENTS], *ours]


def _opponents(census: Census) -> list[Counted]:
    """Return stock settings that use no more memory than ours by either measure, those that keep most (and recompute least)
    first."""
    ours = census.of("ours")
    others = [counted for counted in census.counted if counted.candidate not in (NONE, SELECTIVE, FULL)]
    timed = [counted for counted in others if not counted.candidate.ours and not counted.candidate.offloads]
    small = [counted for counted in timed if counted.holds_no_more_than(ours)]
    return sorted(small, key=lambda counted: counted.most_resident_bytes, reverse=True)


def left_out_of(census: Census, field: list[Counted]) -> Iterator[Skipped]:
    ours = census.of("ours")
    for counted in census.counted:
        if counted in field:
            continue
        held = format_bytes(counted.most_resident_bytes)
        reason = "repeats more than the settings of no more bytes that were timed"
        if counted.candidate.offloads:
            reason = f"holds {held}; its copies run beside nothing on a CPU, so that its seconds would say nothing"
        if not counted.holds_no_more_than(ours):
            reason = f"holds {held}, ours {format_bytes(ours.most_resident_bytes)}: no opponent"
        yield Skipped(name=counted.candidate.name, reason=reason)


def _setting(candidate: Candidate, censuses: list[Census], laps: list[dict[str, Lap]]) -> Setting:
    found = zip((census.of(candidate.name) for census in censuses), (lap[candidate.name] for lap in laps), strict=True)
    return Setting(name=candidate.name, ours=candidate.ours, ranks=tuple(_result(rank, *each) for rank, each in enumerate(found)))


def _result(rank: int, counted: Counted, lap: Lap) -> RankResult:
    on_demand_s = timeline_of({rank: lap.events}).on_demand_s(rank) if lap.events else None
    return RankResult(
        rank=rank,
        step_s=lap.step_s,
        resident_bytes=counted.use.resident_bytes,
        peak_bytes=counted.use.peak_bytes,
        gradients_equal=counted.gradients_equal,
        **(vars(counted.counts) | {"on_demand_s": on_demand_s}),
    )
