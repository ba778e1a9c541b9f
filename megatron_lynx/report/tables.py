"""Figures and tables of a page: parts of a step, use of its waits, the outcome of a run.

Figures of a step depend only on its spans, so that simulated and traced steps compare. The part of a wait that overlaps with
recomputations, or other tasks, is used."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_lynx.errors import PlanMismatch, Problem
from megatron_lynx.figures import unit_of
from megatron_lynx.measure.run_outcome import COLUMNS, RunOutcome
from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.drawing import Point, View, is_wait, kind_of
from megatron_lynx.timeline import Span

Unit = Literal["text", "s", "bytes", "count", "share"]
Cell = str | float | int | None


class Table(NamedTuple):
    id: str
    title: str
    note: str
    columns: Mapping[str, Unit]
    rows: list[list[Cell]]


class Tile(NamedTuple):
    label: str
    unit: Unit
    predicted: float | None
    measured: float | None
    note: str


TASKS = ("hidden", "weight_gradient")


@dataclass
class WaitUse:
    count: int = 0
    seconds: float = 0.0
    used_s: float = 0.0
    tasks: set[str] = field(default_factory=set)

    @property
    def unused_s(self) -> float:
        return max(0.0, self.seconds - self.used_s)

    @property
    def cells(self) -> list[Cell]:
        share = self.used_s / self.seconds if self.seconds else None
        times = (self.seconds, self.seconds / self.count, self.used_s, self.unused_s)
        return [self.count, *times, share, ", ".join(sorted(self.tasks))]


def waits_of(spans: Sequence[Span]) -> dict[str, WaitUse]:
    uses: dict[str, WaitUse] = defaultdict(WaitUse)
    tasks = sorted((span for span in spans if kind_of(span) in TASKS), key=lambda span: span.start_s)
    ends = sorted(span.end_s for span in tasks)
    for wait in spans:
        if not is_wait(wait):
            continue
        use = uses[(wait.window or wait.name).partition("@")[0]]
        use.count += 1
        use.seconds += wait.seconds
        for task in _within(tasks, ends, wait):
            use.used_s += min(task.end_s, wait.end_s) - max(task.start_s, wait.start_s)
            use.tasks.add(f"{task.kind.replace('_', ' ')} {task.half or ''}".strip())
    return dict(uses)


def _within(tasks: Sequence[Span], ends: Sequence[float], wait: Span) -> Iterator[Span]:
    """Yield the tasks that overlap a wait. Tasks do not overlap each other, so starts and ends have the same order."""
    for task in tasks[bisect_left(ends, wait.start_s) :]:
        if task.start_s >= wait.end_s:
            return
        if task.end_s > wait.start_s:
            yield task


def use_table(view: View) -> Table:
    rows: list[list[Cell]] = [
        [label, wait, *use.cells]
        for row, label in view.labels.items()
        for wait, use in sorted(waits_of(view.timeline.ranks[row]).items())
    ]
    note = "Seconds of one step for which a stage would wait for communication, and what of them recomputation used."
    columns: dict[str, Unit] = {"where": "text", "wait": "text", "number": "count"}
    columns |= {"seconds": "s", "each": "s", "used": "s", "unused": "s", "share used": "share", "what ran in it": "text"}
    return Table(f"waits-{view.name}", f"Waits, {view.name}", note, columns, rows)


SECONDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute hidden": "hidden",
    "recompute exposed": "on_demand",
    "weight gradients exposed": "flushed",
    "copies waited for": "wait",
}
"""Columns, and the kinds of spans whose seconds they are. Exposed is also what outlasts its wait."""


def seconds_of(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds of one row by column."""
    by_kind: dict[str, float] = defaultdict(float)
    for span in spans:
        by_kind[kind_of(span)] += span.seconds
    uses = waits_of(spans).values()
    waits = {"waits": sum(use.seconds for use in uses), "unused": sum(use.unused_s for use in uses)}
    return {column: by_kind[kind] for column, kind in SECONDS.items()} | waits


def stage_table(views: Sequence[View]) -> Table:
    rows: list[list[Cell]] = []
    for view in views:
        for row, label in view.labels.items():
            held = view.memory[row].peak_bytes if row in view.memory else None
            seconds = seconds_of(view.timeline.ranks[row])
            rows.append([label, view.name, view.layers.get(row, ""), *seconds.values(), held])
    columns: dict[str, Unit] = dict.fromkeys(("where", "seen", "layers"), "text")
    columns |= {**dict.fromkeys((*SECONDS, "waits", "unused"), "s"), "activations at most": "bytes"}
    note = (
        "Seconds of one step. Passes include the waits inside them; waits include those for messages between stages. "
        "Communication slows what runs beside it, so a bar is longer than the recomputation would be alone."
    )
    return Table("stages", "Stages", note, columns, rows)


def _hidden_share(view: View | None) -> float | None:
    rows = [] if view is None else [seconds_of(view.timeline.ranks[row]) for row in view.stages]
    hidden_s, exposed_s = (sum(row[f"recompute {where}"] for row in rows) for where in ("hidden", "exposed"))
    return hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None


def tiles_of(
    views: Sequence[View], points: Sequence[Point], outcome: RunOutcome | None, stated_s: float | None
) -> Iterator[Tile]:
    seen = {view.name: view for view in views}
    predicted, measured = seen.get("predicted"), seen.get("measured")
    shown = next((point for point in points if point.shown), None)
    if shown is not None and shown.step_s:
        yield Tile("step", "s", shown.step_s, _last_known(outcome, "step_s"), "the optimizer's update included")
    predicted_s = stated_s if predicted is None else predicted.passes_s
    measured_s = _last_known(outcome, "passes_s") if measured is None else measured.passes_s
    tiles = [Tile("passes", "s", predicted_s, measured_s, "forwards and backwards of one step")]
    shares = _hidden_share(predicted), _hidden_share(measured)
    tiles.append(Tile("recompute hidden", "share", *shares, "of all seconds of recomputation, those during waits"))
    yield from (tile for tile in tiles if (tile.predicted, tile.measured) != (None, None))
    if shown is not None and shown.memory_bytes:
        measured_bytes = max(allocated_bytes(outcome).values(), default=None)
        yield Tile("fullest device", "bytes", shown.memory_bytes, measured_bytes, "everything on the device that holds most")


def points_table(points: Sequence[Point]) -> Table:
    columns: dict[str, Unit] = {"setting": "text", "budget": "bytes", "step": "s", "fullest device": "bytes"}
    columns |= {"recompute hidden": "s", "recompute exposed": "s", "to the host": "bytes", "recomputed": "text"}
    note = "Recomputations of the stage with most; activations of a micro-batch that go to the host."
    rows: list[list[Cell]] = [
        [at.label, at.budget_bytes, at.step_s, at.memory_bytes, at.hidden_s, at.exposed_s, at.offloaded_bytes, at.recomputed]
        for at in points
    ]
    return Table("plans", "Plans and stock settings", note, columns, rows)


def check_outcome(outcome: RunOutcome, plan: Plan, where: str) -> None:
    if outcome.plan_digest != plan.digest:
        run_digest, needed = (f"{digest[:12]}..." for digest in (outcome.plan_digest, plan.digest))
        todo = f"give {outcome.plan}, as it was when the run began"
        problem = Problem(f"{where}: plan_digest", run_digest, f"{needed}, the plan's", todo)
        raise PlanMismatch("the run was under another plan", [problem])


def outcome_table(outcome: RunOutcome) -> Table:
    ended = "the run has ended" if outcome.finished else "the run has not ended, or broke off"
    met = ", predicted ones for what came" if any(report.met for report in outcome.reports) else ""
    note = f"Of each stage the rank that needs most; seconds of one step{met}. {outcome.ranks} ranks; {ended}."
    columns: dict[str, Unit] = {"when": "text", "stage": "count"}
    columns |= {f"{group} {heading}": unit_of(name) for group, heading, name in COLUMNS}
    rows: list[list[Cell]] = [
        ["the end" if at.when == "end" else f"step {at.step}", row.stage, *at.cells(row)]
        for at in outcome.reports
        for row in at.stages
    ]
    return Table("outcome", "How the run came out", note, columns, rows)


def allocated_bytes(outcome: RunOutcome | None) -> dict[int, int]:
    rows = () if outcome is None else outcome.reports[-1].stages
    return {row.stage: row.measured.allocated_bytes for row in rows if row.measured.allocated_bytes is not None}


def _last_known(outcome: RunOutcome | None, figure: Literal["passes_s", "step_s"]) -> float | None:
    for report in reversed(outcome.reports) if outcome is not None else ():
        seconds = [value for row in report.stages if (value := getattr(row.measured, figure)) is not None]
        if seconds:
            return float(max(seconds))
    return None
