"""Figures and tables of a page: parts of a step, use of its waits, the outcome of a run.

Figures of a step depend only on its spans, so that simulated and traced steps compare.

wait            ├──────────── bwd.mlp.0 ────────────┤       used: overlap with recomputations (and other tasks)
recomputations    ├─ attention(3) ─┤                        unused: the rest
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megatron_lynx.errors import PlanMismatch, Problem
from megatron_lynx.figures import unit_of
from megatron_lynx.measure.run_outcome import COLUMNS, RunOutcome
from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.island import Cell, Column, Point, Table, Tile, Unit, is_wait, kind_of
from megatron_lynx.timeline import Span, Timeline

TASKS = ("hidden", "weight_gradient")

EXPOSED = {"on_demand": "recompute", "flushed": "weight gradient", "wait": "copy from the host"}


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
    """Return the use of one row's waits, by name without the layer."""
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


def use_table(name: str, timeline: Timeline, labels: Mapping[int, str]) -> Table:
    rows: list[list[Cell]] = [
        [label, wait, *use.cells] for row, label in labels.items() for wait, use in sorted(waits_of(timeline.ranks[row]).items())
    ]
    note = "Seconds of one step for which a stage would wait for communication, and what of them recomputation used."
    columns: dict[str, Unit] = {"where": "text", "wait": "text", "number": "count"}
    columns |= {"seconds": "s", "each": "s", "used": "s", "unused": "s", "share used": "share", "what ran in it": "text"}
    return _table(f"waits-{name}", f"Waits, {name}", note, columns, rows)


def exposed_table(name: str, timeline: Timeline, labels: Mapping[int, str]) -> Table:
    rows: list[list[Cell]] = []
    for row, label in labels.items():
        exposed: dict[tuple[str, str], list[float]] = defaultdict(list)
        for span in timeline.ranks[row]:
            if (kind := kind_of(span)) in EXPOSED:
                exposed[EXPOSED[kind], span.half or ""].append(span.seconds)
        rows += [
            [label, *what, len(seconds), sum(seconds), sum(seconds) / len(seconds)] for what, seconds in sorted(exposed.items())
        ]
    note = "Recomputation on demand and what went on after its wait was over, other tasks outside of waits, and waits for copies."
    columns: dict[str, Unit] = {"where": "text", "what": "text", "half": "text", "number": "count", "seconds": "s", "each": "s"}
    return _table(f"exposed-{name}", f"What no wait hid, {name}", note, columns, rows)


@dataclass(frozen=True)
class RowFigures:
    forward_s: float
    backward_s: float
    hidden_s: float
    exposed_s: float
    """Recomputations on demand, and the remainder of those that outlasted their wait."""
    waits_s: float
    unused_s: float
    collectives_s: float
    """Waits for tensor-parallel collectives."""
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
    """One view's timeline; label, layers and peak bytes of each row shown."""

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
        """Recomputations in waits, as a share of all."""
        rows = self.rows.values()
        hidden_s, exposed_s = sum(row.hidden_s for row in rows), sum(row.exposed_s for row in rows)
        return hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None

    @property
    def unused_share(self) -> float | None:
        """Unused waits for collectives, as a share of all."""
        waits_s = sum(row.collectives_s for row in self.rows.values())
        return sum(row.collectives_unused_s for row in self.rows.values()) / waits_s if waits_s else None

    @property
    def exposed_s(self) -> float:
        """Seconds of exposed recomputations on the stage with most."""
        return max((row.exposed_s for row in self.rows.values()), default=0.0)


def stage_table(views: Sequence[Seen]) -> Table:
    rows: list[list[Cell]] = []
    for seen in views:
        for row, figures in seen.rows.items():
            held = seen.held_bytes.get(row)
            rows.append([seen.labels[row], seen.name, seen.layers.get(row, ""), *vars(figures).values(), held])
    columns: dict[str, Unit] = dict.fromkeys(("where", "seen", "layers"), "text")
    passes = ("forward", "backward", "recompute hidden", "recompute exposed")
    waits = ("waits", "unused", "of collectives", "unused of these")
    columns |= {**dict.fromkeys((*passes, *waits), "s"), "activations at most": "bytes"}
    note = (
        "Seconds of one step. Passes include the waits inside them; waits include those for messages between stages. "
        "Communication slows what runs beside it, so a bar is longer than the recomputation would be alone."
    )
    return _table("stages", "Stages", note, columns, rows)


FIGURES: tuple[tuple[str, Unit, str, Callable[[Seen], float | None]], ...] = (
    ("passes", "s", "forwards and backwards of one step", lambda seen: seen.passes_s),
    ("recompute hidden", "share", "of all seconds of recomputation, those behind waits", lambda seen: seen.hidden_share),
    ("recompute exposed", "s", "in one step, on the stage that has most", lambda seen: seen.exposed_s),
    ("collectives unused", "share", "of all seconds of waits for tensor-parallel collectives", lambda seen: seen.unused_share),
)


def tiles_of(
    views: Sequence[Seen], points: Sequence[Point], outcome: RunOutcome | None = None, stated_s: float | None = None
) -> Iterator[Tile]:
    """Yield the tiles. `stated_s`: seconds of passes stated by a plan without a simulation."""
    predicted = next((seen for seen in views if seen.name == "predicted"), None)
    measured = next((seen for seen in views if seen.name == "measured"), None)
    shown = next((point for point in points if point["shown"]), None)
    if shown is not None and shown["step_s"]:
        measured_s, note = _last_known(outcome, "step_s"), "the optimizer's update included"
        yield Tile(label="step", unit="s", predicted=shown["step_s"], measured=measured_s, note=note)
    for label, unit, note, figure in FIGURES:
        values = [None if seen is None else figure(seen) for seen in (predicted, measured)]
        if label == "passes":
            values[0] = stated_s if values[0] is None else values[0]
            values[1] = _last_known(outcome, "passes_s") if values[1] is None else values[1]
        if values != [None, None]:
            yield Tile(label=label, unit=unit, predicted=values[0], measured=values[1], note=note)
    if shown is not None and shown["memory_bytes"]:
        measured_bytes = max([stage["measured_bytes"] or 0 for stage in shown["stages"]], default=0) or None
        note = "everything on the device that holds most, at its peak"
        yield Tile(label="fullest device", unit="bytes", predicted=shown["memory_bytes"], measured=measured_bytes, note=note)


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
    return _table("outcome", "How the run came out", note, columns, rows)


def allocated_bytes(outcome: RunOutcome) -> dict[int, int]:
    rows = outcome.reports[-1].stages
    return {row.stage: row.measured.allocated_bytes for row in rows if row.measured.allocated_bytes is not None}


def _last_known(outcome: RunOutcome | None, figure: Literal["passes_s", "step_s"]) -> float | None:
    """Return the maximum over stages from the latest report that has the figure."""
    for report in reversed(outcome.reports) if outcome is not None else ():
        seconds = [value for row in report.stages if (value := getattr(row.measured, figure)) is not None]
        if seconds:
            return float(max(seconds))
    return None


def _table(name: str, title: str, note: str, columns: dict[str, Unit], rows: list[list[Cell]]) -> Table:
    shown = [Column(label=label, unit=unit) for label, unit in columns.items()]
    return Table(id=name, title=title, note=note, columns=shown, rows=rows)
