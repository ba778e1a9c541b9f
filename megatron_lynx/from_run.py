"""Corrects the next plan with the figures that were measured in a run under a plan.

    lynx_outcome.json ──lesson──> Learned ──┬─ attention, mlp, experts, collectives, exchanges      x the profile's
                                            ├─ seconds         x all of these (`profiler.profile`)
                                            ├─ beside_bytes    + predicted memory of each stage (`cost.stage_memory`)
                                            └─ device_bytes    limit of the budget (`Job.memory_budget_bytes`)

    attention ...  computation of such halves in one traced step  /  the profile's for equally many
    collectives    rest of the communication when forwards waited for it  /  the profile's for equally many such waits
    seconds        measured passes of the slowest stage, without the reduction of gradients  /  the plan's at these prices
    beside_bytes   for each stage: peak allocated  -  predicted peak
    device_bytes   the device  -  used outside PyTorch's allocator  -  reserved but not allocated; the least of all stages

If micro-batches were fewer or not full, seconds are compared with the plan's scaled ones (`Report.predicted_of`); halves and
bytes are learned from full micro-batches only.

The outcome has the corrections of the run's plan: from run to run factors multiply, and offsets add up.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lynx.anatomy import HALVES, Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.update import reduction_s
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.figures import Learned
from megatron_lynx.measure.run_outcome import Parts, PartSeconds, Report, RunOutcome, StageRow, added
from megatron_lynx.plan.facts import without_options
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import Profile, as_learned
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.units import format_bytes, format_seconds

ENOUGH_STEPS = 5
"""The first two steps differ; the others' median is reported."""

MOST_TIMES = 2.0
"""Passes longer or shorter than predicted by more than this factor are another machine's."""

MOST_OFF = 0.5
"""The same for bytes, as a share of the prediction."""


@dataclass(frozen=True)
class Price:
    """Seconds of one kind of half, or of wait, for one micro-batch on one rank, forward and backward: was, is."""

    part: str
    was_s: float
    is_s: float

    @property
    def times(self) -> float:
        return self.is_s / self.was_s


@dataclass(frozen=True)
class Lesson:
    source: str
    """The outcome file."""
    profile: str
    steps: int
    learned: Learned
    """From this run and earlier ones."""
    seconds: tuple[float, float]
    """Passes of a step: was, is."""
    stages: tuple[tuple[int, int] | None, ...]
    """Peak by stage: was, is; None if it was not measured."""
    budget: tuple[int, int] | None
    """Limit of PyTorch's allocations on a device: was, is; None if unknown."""
    not_learned: tuple[str, ...]
    prices: tuple[Price, ...] = ()

    def job(self, job: Job) -> Job:
        return job.model_copy(update={"learned": self.learned})

    def costs(self, profile: Profile) -> Profile:
        return as_learned(profile, self.learned)

    @property
    def origin(self) -> dict[str, object]:
        return {"profile": self.profile, "learned": self.learned}

    @property
    def lines(self) -> tuple[str, ...]:
        was_s, is_s = self.seconds
        rows = [f"learned from {self.source} ({self.steps} steps): was -> is"]
        rows.append(f"  passes of a step   {format_seconds(was_s)} -> {format_seconds(is_s)}   x {is_s / was_s:.3f}")
        for price in self.prices:
            moved = f"{format_seconds(price.was_s)} -> {format_seconds(price.is_s)}   x {price.times:.3f}"
            rows.append(f"  {price.part}   {moved}")
        for stage, peak in enumerate(self.stages):
            if peak is not None:
                more = f"{'+' if peak[1] >= peak[0] else ''}{format_bytes(peak[1] - peak[0])}"
                rows.append(f"  stage {stage} at its peak   {format_bytes(peak[0])} -> {format_bytes(peak[1])}   {more}")
        if self.budget is not None:
            was, now = map(format_bytes, self.budget)
            rows.append(f"  budget of a device   {was}, kept" if was == now else f"  budget of a device   {was} -> {now}")
        return (*rows, *(f"  not learned: {omission}" for omission in self.not_learned))

    @property
    def as_json(self) -> dict[str, Any]:
        was_s, is_s = self.seconds
        stages = ((stage, peak) for stage, peak in enumerate(self.stages) if peak is not None)
        return {
            "file": self.source,
            "steps": self.steps,
            "passes_s": {"was": was_s, "is": is_s, "times": is_s / was_s},
            "peak_bytes": [{"stage": stage, "was": was, "is": now} for stage, (was, now) in stages],
            "budget_bytes": None if self.budget is None else dict(zip(("was", "is"), self.budget, strict=True)),
            "prices_s": [{"part": one.part, "was": one.was_s, "is": one.is_s, "times": one.times} for one in self.prices],
            "not_learned": list(self.not_learned),
            "learned": self.learned.model_dump(mode="json"),
        }


def lesson(outcome: RunOutcome, job: Job, profile: Profile, where: str, plan: Plan | None = None) -> Lesson:
    """`where`: the outcome's file; `plan`: the run's, if it still exists. Raises `ConfigError` with every reason against it."""
    if problems := [*_of_another(outcome, job, profile, where), *_untypical(outcome, where), *_nonsense(outcome, job, where)]:
        raise ConfigError(f"no plan can be made from the run in {where}", problems)
    last, before = outcome.reports[-1], outcome.learned or Learned()
    stages = tuple(_peak(last, row) for row in last.stages)
    off = [0 if peak is None else peak[1] - peak[0] for peak in stages]
    used = [(row.measured.outside_bytes, row.measured.slack_bytes) for row in last.stages]
    left = [job.device_reserve.memory_bytes - out - slack for out, slack in used if out is not None and slack is not None]
    device_bytes = min(left, default=None)
    was_s, is_s = _seconds(last, job)
    prices, not_learned = _prices(outcome, job, as_learned(profile, before), plan)
    apart = before.model_copy(update={NAMES[price.part]: getattr(before, NAMES[price.part]) * price.times for price in prices})
    at_these_s = was_s
    if prices and plan is not None:
        full_s = rehearse(plan, as_learned(profile, apart), job=job).step_s
        at_these_s = full_s if last.met is None else full_s * last.met.passes
    bytes_ = {"beside_bytes": tuple(before.beside(stage) + more for stage, more in enumerate(off)), "device_bytes": device_bytes}
    learned = apart.model_copy(update={"seconds": before.seconds * is_s / at_these_s, **bytes_})
    budget_bytes = job.memory_budget_bytes
    return Lesson(
        source=where,
        profile=profile.digest,
        steps=last.step,
        learned=learned,
        seconds=(was_s, is_s),
        stages=stages,
        budget=None if device_bytes is None else (budget_bytes, min(budget_bytes, device_bytes)),
        not_learned=(*_not_learned(last), *not_learned),
        prices=prices,
    )


NAMES: dict[str, str] = {
    "attention halves": HALVES[0],
    "MLP halves": HALVES[1],
    "halves of experts": "experts",
    "collectives": "collectives",
    "exchanges of experts": "exchanges",
}


def _prices(outcome: RunOutcome, job: Job, profile: Profile, plan: Plan | None) -> tuple[tuple[Price, ...], list[str]]:
    """Prices that changed individually, and why others were not learned. `profile`: as corrected for the run's plan."""
    last = outcome.reports[-1]
    if last.met is not None and not last.met.usual:
        return (), ["seconds of halves and waits: micro-batches were not as full, or as long, as planned"]
    if all(row.measured.parts is None for row in last.stages):
        return (), ["seconds of halves and waits: no step of the run was traced for them"]
    if plan is None:
        return (), [f"seconds of halves and waits: {outcome.plan}, the run's plan, is not there any more, or was changed"]
    parts = added(row.measured.parts or {} for row in last.stages)
    candidates = [*_halves(parts, profile), *_waits(parts, job, profile)]
    usual = tuple(price for price in candidates if 1 / MOST_TIMES <= price.times <= MOST_TIMES)
    return usual, [f"{price.part}: x {price.times:.3g} is another machine's" for price in candidates if price not in usual]


def _halves(parts: Parts, profile: Profile) -> Iterator[Price]:
    for label, name in list(NAMES.items())[:3]:
        half, costs = parts.get(name, PartSeconds()), getattr(profile, name)
        if half.count and costs is not None:
            was_s = sum(item.forward_s + item.backward_s for item in costs.items.values())
            if was_s > 0:
                yield Price(label, was_s, half.seconds / half.count)


def _waits(parts: Parts, job: Job, profile: Profile) -> Iterator[Price]:
    """Waits of forwards, in which no weight gradient runs. Waits that ended before their tasks are left out."""
    lengths_s = {place: length_s for place, length_s in _forward_waits_s(job, profile).items() if length_s and place in parts}
    for label, of_experts in (("collectives", False), ("exchanges of experts", True)):
        places = [place for place in lengths_s if (".experts." in place) is of_experts]
        count, is_s = sum(parts[place].count for place in places), sum(parts[place].seconds for place in places)
        if count and is_s:
            yield Price(label, sum(parts[place].count * lengths_s[place] for place in places) / count, is_s / count)


def _forward_waits_s(job: Job, profile: Profile) -> dict[str, float]:
    sections: dict[str, Section] = {half: job.model.halves[half] for half in HALVES}
    if profile.experts is not None:
        sections["experts"] = profile.shape.sections[-1]
    size = LayerShape.of(job).gathered_bytes
    return {
        f"fwd.{name}.{ordinal}": seconds
        for name, section in sections.items()
        for ordinal, seconds in enumerate(window_lengths_s(profile, "fwd", section, size))
    }


def _seconds(report: Report, job: Job) -> tuple[float, float]:
    predicted = [stage.passes_s for row in report.stages if (stage := report.predicted_of(row)) is not None and stage.passes_s]
    measured = [row.measured.passes_s for row in report.stages if row.measured.passes_s is not None]
    return max(predicted), max(measured) - reduction_s(job)


def _peak(report: Report, row: StageRow) -> tuple[int, int] | None:
    """Predicted and measured peak of a stage, or None if one is unknown, or micro-batches were not full."""
    if report.part_of_tokens is not None:
        return None
    if row.predicted is None or row.predicted.memory_bytes is None or row.measured.allocated_bytes is None:
        return None
    return row.predicted.memory_bytes, row.measured.allocated_bytes


def _not_learned(report: Report) -> Iterator[str]:
    if report.part_of_tokens is not None:
        yield f"bytes: micro-batches had {100 * report.part_of_tokens:.3g} % of the tokens that a plan's bytes are for"
    elif unknown := [str(row.stage) for row in report.stages if _peak(report, row) is None]:
        yield f"bytes of {_stages(unknown)}: not measured, or not predicted"


def _of_another(outcome: RunOutcome, job: Job, profile: Profile, where: str) -> Iterator[Problem]:
    again = f"megatron-lynx plan --from-run {shlex.quote(where)} -o PLAN {without_options(outcome.asked or 'JOB', '--from-run')}"
    profile_digest, last = outcome.profile_digest, outcome.reports[-1]
    if outcome.job_digest is None:
        yield Problem(
            f"{where}: job_digest", "nothing", "the job of the run's plan", "launch a plan that megatron-lynx plan made"
        )
    elif outcome.job_digest != job.digest:
        digest, needed = f"{outcome.job_digest[:12]}...", f"{job.digest[:12]}..., the job that is asked for"
        yield Problem(f"{where}: job_digest", digest, needed, f"ask as its plan was asked for: {again}")
    elif profile_digest is not None and profile_digest != profile.digest:
        digest, needed = f"{profile_digest[:12]}...", f"{profile.digest[:12]}..., the profile that is given"
        yield Problem(f"{where}: profile_digest", digest, needed, "give the --profile, or the cluster, of its plan")
    elif (numbers := [row.stage for row in last.stages]) != list(range(job.parallel.pipeline)):
        yield Problem(f"{where}: stages", ", ".join(map(str, numbers)), f"0 to {job.parallel.pipeline - 1}, as the job has them")


def _untypical(outcome: RunOutcome, where: str) -> Iterator[Problem]:
    last = outcome.reports[-1]
    if not outcome.finished:
        yield Problem(f"{where}: finished", "false", "a run that has ended", "--exit-interval 20 ends one behind so many steps")
    if last.step < ENOUGH_STEPS:
        yield Problem(f"{where}: reports", f"{last.step} steps", f"at least {ENOUGH_STEPS}", "run it for longer")
    if outcome.checked:
        yield Problem(f"{where}: checked", "true", "a run without --lynx-check", "stock's steps filled the devices, too")


def _nonsense(outcome: RunOutcome, job: Job, where: str) -> Iterator[Problem]:
    last = outcome.reports[-1]
    if silent := [str(row.stage) for row in last.stages if row.predicted is None or not row.predicted.passes_s]:
        yield Problem(f"{where}: {_stages(silent)}", "a plan that predicts no seconds", "one of megatron-lynx plan")
    elif all(row.measured.passes_s is None for row in last.stages):
        yield Problem(f"{where}: passes_s", "null", "seconds: all steps of the run were checked or traced")
    else:
        was_s, is_s = _seconds(last, job)
        if not 1 / MOST_TIMES <= is_s / was_s <= MOST_TIMES:
            needed = f"{format_seconds(was_s / MOST_TIMES)} to {format_seconds(was_s * MOST_TIMES)}, around what was predicted"
            yield Problem(f"{where}: passes_s", format_seconds(is_s), needed, "another machine's run? Then say so with --cluster")
    for stage, peak in enumerate(_peak(last, row) for row in last.stages):
        if peak is not None and abs(peak[1] - peak[0]) > MOST_OFF * peak[0]:
            low, high = (format_bytes((1 + sign * MOST_OFF) * peak[0]) for sign in (-1, 1))
            needed = f"{low} to {high}, around what was predicted"
            yield Problem(f"{where}: stage {stage}, allocated_bytes", format_bytes(peak[1]), needed, "another machine's run?")


def _stages(numbers: Sequence[str]) -> str:
    return f"stage{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
