"""The launch that a plan was made of, on the page: what it takes today beside the plan, and what was read of it.

a plan's launch ──> today, priced ──> first table
              └──> facts, and where each comes from ──> last table
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lynx.advise.today import Launch, Row, launch_today
from megatron_lynx.config.job import Job
from megatron_lynx.cost.step_range import StepRange
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.launch_arguments.table import remarks
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.report.island import Cell, Column, Point, Table, Unit


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch with what it takes today, and its plan."""

    reading: Reading
    today: Launch
    plan: Row

    def tables(self) -> Iterator[Table]:
        rows: list[list[Cell]] = []
        if self.today.row is not None:
            rows.append([f"today: {self.today.setting}", *self._figures(self.today.row)])
        rows.append(["the plan", *self._figures(self.plan)])
        left_out = " ".join(self.today.flags)
        note = f"simulated, the optimizer's update included; left out of the launch under the plan: {left_out or 'nothing'}"
        columns: list[tuple[str, Unit]] = [("", "text"), ("step", "s"), ("of today", "share"), ("fullest device", "bytes")]
        yield _table("today", "The launch today, and the plan", f"{self.today.unknown} {note}".strip(), columns, rows)
        facts: list[list[Cell]] = [[fact.place, str(fact.value), fact.origin] for fact in self.reading.facts]
        words: list[tuple[str, Unit]] = [("job", "text"), ("value", "text"), ("from", "text")]
        yield _table("launch", "What was read of the launch", "; ".join(remarks(self.reading)), words, facts)

    def _figures(self, row: Row) -> list[Cell]:
        before = self.today.row
        return [row.step.most_s, None if before is None else row.step.most_s / before.step.most_s, row.memory_bytes]


def planned_launch(plan: Plan, job: Job, costs: Profile, reading: Reading, own: Point) -> PlannedLaunch:
    """The launch that a plan was made of, with its job. `own`: the plan's figures."""
    today = launch_today(job, costs, reading.with_graphs_of(plan.model.captured))
    return PlannedLaunch(reading, today, Row("plan", StepRange.known(own["step_s"]), own["memory_bytes"] or 0))


def _table(name: str, title: str, note: str, columns: list[tuple[str, Unit]], rows: list[list[Cell]]) -> Table:
    return Table(id=name, title=title, note=note, columns=[Column(label=label, unit=unit) for label, unit in columns], rows=rows)
