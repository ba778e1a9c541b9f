"""Figures of a view that are the same for a simulated step and a traced one, so that they can stand side by side.

They are taken from spans alone. Bars of halves include the waits inside them. Beside them: the few figures at the top of a page,
how a run came out (`lynx_outcome.json`), and the settings of a comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_lynx.errors import PlanMismatch, Problem
from megatron_lynx.measure.run_outcome import COLUMNS, Report, RunOutcome, StageRow
from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.island import Cell, Column, Point, Table, Tile, Unit
from megatron_lynx.report.kinds import kind_of
from megatron_lynx.report.waits import waits_of
from megatron_lynx.simulator.timeline import Span, Timeline

if TYPE_CHECKING:
    from megatron_lynx.measure.measurement import Measurement


@dataclass(frozen=True)
class RowFigures:
    """Where one row's step went. Seconds."""

    forward_s: float
    backward_s: float
    hidden_s: float
    exposed_s: float
    """Replays on demand, and what of others was longer than their wait."""
    waits_s: float
    unused_s: float
    """What of the waits nothing used."""
    collectives_s: float
    """What of the waits is for tensor-parallel collectives."""
    collectives_unused_s: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> RowFigures:
        seconds = dict.fromkeys(("forward", "backward", "hidden", "on_demand"), 0.0)
        for span in spans:
            if (kind := kind_of(span)) in seconds:
                seconds[kind] += span.seconds
        uses = waits_of(spans)
        collectives = [use for name, use in uses.items() if not name.startswith("pipe.")]
        waits = ((sum(use.seconds for use in part), sum(use.unused_s for use in part)) for part in (uses.values(), collectives))
        return cls(*seconds.values(), *(figure for pair in waits for figure in pair))


@dataclass(frozen=True)
class Seen:
    """One view's timeline, and of each row that is shown its label, its layers and what it holds at most."""

    name: str
    passes_s: float
    timeline: Timeline
    labels: Mapping[int, str]
    layers: Mapping[int, str]
    held_bytes: Mapping[int, int]

    @property
    def rows(self) -> dict[int, RowFigures]:
        return {row: RowFigures.of(self.timeline.ranks[row]) for row in self.labels}

    @property
    def hidden_share(self) -> float | None:
        """Of the seconds of replays, those behind waits."""
        rows = self.rows.values()
        hidden_s, exposed_s = sum(row.hidden_s for row in rows), sum(row.exposed_s for row in rows)
        return hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None

    @property
    def unused_share(self) -> float | None:
        """Of the seconds of waits for collectives, those that nothing used."""
        waits_s = sum(row.collectives_s for row in self.rows.values())
        return sum(row.collectives_unused_s for row in self.rows.values()) / waits_s if waits_s else None

    @property
    def exposed_s(self) -> float:
        """Seconds of exposed replays on the stage that has most of them."""
        return max((row.exposed_s for row in self.rows.values()), default=0.0)


def stage_table(views: Sequence[Seen]) -> Table:
    """Where the step of every row goes, in all views."""
    rows: list[list[Cell]] = []
    for seen in views:
        for row, figures in seen.rows.items():
            held = seen.held_bytes.get(row)
            rows.append([seen.labels[row], seen.name, seen.layers.get(row, ""), *vars(figures).values(), held])
    columns = [Column(label=label, unit="text") for label in ("where", "seen", "layers")]
    names = ("forward", "backward", "replays hidden", "replays exposed", "waits", "unused", "of collectives", "unused of these")
    columns += [Column(label=label, unit="s") for label in names]
    columns.append(Column(label="activations at most", unit="bytes"))
    note = (
        "Seconds of one step. Passes include the waits inside them; waits include those for messages between stages. "
        "Communication slows what runs beside it, so a bar is longer than a replay would be alone."
    )
    return Table(id="stages", title="Stages", note=note, columns=columns, rows=rows)


FIGURES: tuple[tuple[str, Unit, str, Callable[[Seen], float | None]], ...] = (
    ("passes", "s", "forwards and backwards of one step", lambda seen: seen.passes_s),
    ("replays hidden", "share", "of all seconds of replays, those behind waits", lambda seen: seen.hidden_share),
    ("replays exposed", "s", "in one step, on the stage that has most", lambda seen: seen.exposed_s),
    ("collectives unused", "share", "of all seconds of waits for tensor-parallel collectives", lambda seen: seen.unused_share),
)


WITH_UPDATE = "the optimizer's update included"


def tiles_of(
    views: Sequence[Seen], points: Sequence[Point], outcome: RunOutcome | None = None, stated_s: float | None = None
) -> Iterator[Tile]:
    """Those of which there is a figure. `stated_s`: of passes, as the plan says, for where nothing is simulated."""
    predicted = next((seen for seen in views if seen.name == "predicted"), None)
    measured = next((seen for seen in views if seen.name == "measured"), None)
    shown = next((point for point in points if point["shown"]), None)
    if shown is not None and shown["step_s"]:
        measured_s = None if outcome is None else whole_step_s(outcome)
        yield Tile(label="step", unit="s", predicted=shown["step_s"], measured=measured_s, note=WITH_UPDATE)
    for label, unit, note, figure in FIGURES:
        values = [None if seen is None else figure(seen) for seen in (predicted, measured)]
        if label == "passes":
            values[0] = stated_s if values[0] is None else values[0]
            values[1] = passes_s(outcome) if values[1] is None and outcome is not None else values[1]
        if values != [None, None]:
            yield Tile(label=label, unit=unit, predicted=values[0], measured=values[1], note=note)
    if shown is not None and shown["memory_bytes"]:
        measured_bytes = max([stage["measured_bytes"] or 0 for stage in shown["stages"]], default=0) or None
        note = "everything on the device that holds most, at its peak"
        yield Tile(label="fullest device", unit="bytes", predicted=shown["memory_bytes"], measured=measured_bytes, note=note)


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
    met = ", predicted ones for what came" if any(report.met for report in outcome.reports) else ""
    return Table(
        id="outcome",
        title="How the run came out",
        note=f"Of each stage the rank that needs most; seconds of one step{met}. {outcome.ranks} ranks; {ended}.",
        columns=[
            Column(label="when", unit="text"),
            Column(label="stage", unit="count"),
            *(Column(label=f"{group} {name}", unit=unit) for group, name, unit in COLUMNS),
        ],
        rows=[[_when(report), row.stage, *report.cells(row)] for report in outcome.reports for row in report.stages],
    )


def _when(report: Report) -> str:
    return "the end" if report.when == "end" else f"step {report.step}"


def allocated_bytes(outcome: RunOutcome) -> dict[int, int]:
    """What devices held at most, by stage, as far as it was measured."""
    rows = outcome.reports[-1].stages
    return {row.stage: row.measured.allocated_bytes for row in rows if row.measured.allocated_bytes is not None}


def passes_s(outcome: RunOutcome) -> float | None:
    """Seconds of a step's forwards and backwards, of the last time at which they were known."""
    return _last_known(outcome, lambda row: row.measured.passes_s)


def whole_step_s(outcome: RunOutcome) -> float | None:
    """Seconds of a whole step, of the last time at which they were known."""
    return _last_known(outcome, lambda row: row.measured.step_s)


def _last_known(outcome: RunOutcome, figure: Callable[[StageRow], float | None]) -> float | None:
    """The largest of all stages."""
    for report in reversed(outcome.reports):
        seconds = [value for row in report.stages if (value := figure(row)) is not None]
        if seconds:
            return max(seconds)
    return None


def settings_table(measurement: Measurement) -> Table:
    """A row for each setting that was timed."""
    from megatron_lynx.compare.report import verdicts

    rows: list[list[Cell]] = []
    for setting in measurement.settings:
        ratio = measurement.ratio_to_none(setting)
        equal = {True: "yes", False: "NO", None: "reference" if ratio == 1.0 else "not compared"}[setting.gradients_equal]
        found = setting.figures
        figures = (found.resident_bytes, found.peak_bytes, found.in_windows, found.on_demand)
        rows.append([setting.name, setting.step.median_s, ratio, *figures, equal])
    columns: tuple[tuple[str, Unit], ...] = (
        ("setting", "text"),
        ("step", "s"),
        ("of none", "share"),
        ("resident activations", "bytes"),
        ("peak", "bytes"),
        ("replays hidden", "count"),
        ("replays on demand", "count"),
        ("gradients equal", "text"),
    )
    return Table(
        id="settings",
        title="Settings side by side, measured",
        note=" ".join(verdicts(measurement)),
        columns=[Column(label=label, unit=unit) for label, unit in columns],
        rows=rows,
    )


def how_measured(measurement: Measurement) -> list[str]:
    """How times and bytes were counted, on what, and what was left out."""
    from megatron_lynx.compare.report import notes

    return list(notes(measurement))
