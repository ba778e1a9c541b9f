"""How a run came out (`lynx_outcome.json`), as a table and beside what its plan predicts."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.errors import PlanMismatch, Problem
from megatron_lynx.measure.run_outcome import Report, RunOutcome, StagePredicted, StageRow
from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.island import Cell, Column, Table, Unit

COLUMNS: tuple[tuple[str, Unit], ...] = (
    ("when", "text"),
    ("stage", "count"),
    ("peak predicted", "bytes"),
    ("allocated", "bytes"),
    ("reserved", "bytes"),
    ("passes predicted", "s"),
    ("passes", "s"),
    ("whole step", "s"),
    ("hidden predicted", "s"),
    ("in windows", "s"),
    ("exposed predicted", "s"),
    ("on demand", "s"),
)


def check_outcome(outcome: RunOutcome, plan: Plan, where: str) -> None:
    """Raises `PlanMismatch` where the run was under another plan."""
    if outcome.plan_digest != plan.digest:
        found, needed = (f"{digest[:12]}..." for digest in (outcome.plan_digest, plan.digest))
        todo = f"give {outcome.plan}, as it was when the run began"
        problem = Problem(f"{where}: plan_digest", found, f"{needed}, the plan's", todo)
        raise PlanMismatch("the run was under another plan", [problem])


def outcome_table(outcome: RunOutcome) -> Table:
    """A row for each stage, at every time that was told of."""
    ended = "the run has ended" if outcome.finished else "the run has not ended, or broke off"
    return Table(
        id="outcome",
        title="How the run came out",
        note=f"Of each stage the rank that needs most; seconds of one step. {outcome.ranks} ranks; {ended}.",
        columns=[Column(label=label, unit=unit) for label, unit in COLUMNS],
        rows=[_cells(report, row) for report in outcome.reports for row in report.stages],
    )


def _cells(report: Report, row: StageRow) -> list[Cell]:
    predicted, measured = row.predicted or StagePredicted(), row.measured
    return [
        "the end" if report.when == "end" else f"step {report.step}",
        row.stage,
        predicted.memory_bytes,
        measured.allocated_bytes,
        measured.reserved_bytes,
        predicted.passes_s,
        measured.passes_s,
        measured.step_s,
        predicted.hidden_replay_s,
        measured.in_windows_s,
        predicted.exposed_replay_s,
        measured.on_demand_s,
    ]


def allocated_bytes(outcome: RunOutcome) -> dict[int, int]:
    """What devices held at most, by stage, as far as it was measured."""
    rows = outcome.reports[-1].stages
    return {row.stage: row.measured.allocated_bytes for row in rows if row.measured.allocated_bytes is not None}


def passes_s(outcome: RunOutcome) -> float | None:
    """Seconds of a step's forwards and backwards, of the last time at which they were known."""
    return next(_known(outcome), None)


def _known(outcome: RunOutcome) -> Iterator[float]:
    for report in reversed(outcome.reports):
        seconds = [row.measured.passes_s for row in report.stages if row.measured.passes_s is not None]
        if seconds:
            yield max(seconds)
