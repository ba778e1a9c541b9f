"""The steps of a report: the predicted one is a simulation or a file of `simulate`, the measured one the trace of a run.

In spans, a wait lasts until its work is complete; in a view it ends where exposed work begins:

    wait             ├──────────────┤                 ├──────┤
    recomputations   ├hidden┤exposed┤      ─>         ├hidden┤exposed┤
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.given import Given, stages_of_rows
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.timeline import FLUSHED, MemoryCurve, Span, Timeline

MOST_ROWS = 32
"""Rows of a view; of more ranks than that, one of each stage is shown."""

EXPOSED = (None, ON_DEMAND, FLUSHED)
"""`Span.window` of exposed work."""


def kind_of(span: Span) -> str:
    kind: str = span.kind
    exposed = span.window in EXPOSED
    if kind == "recompute":
        return "on_demand" if exposed else "hidden"
    if kind == "weight_gradient" and exposed:
        return "flushed"
    if kind == "copy_wait":
        return "wait"
    return "recv" if kind == "window" and (span.window or "").startswith("pipe.") else kind


def is_wait(span: Span) -> bool:
    return span.kind in ("window", "recv")


@dataclass(frozen=True)
class View:
    """One step. Its rows are stages, or ranks of a run."""

    name: Literal["predicted", "measured"]
    title: str
    passes_s: float
    timeline: Timeline
    stages: Mapping[int, int]
    layers: Mapping[int, str] = field(default_factory=dict)
    memory: Mapping[int, MemoryCurve] = field(default_factory=dict)
    """Bytes of the layers of a row."""
    regenerated: Mapping[int, MemoryCurve] = field(default_factory=dict)
    """Recomputed bytes among them."""

    @property
    def labels(self) -> dict[int, str]:
        return {
            row: f"stage {stage}" + ("" if self.name == "predicted" else f", rank {row}") for row, stage in self.stages.items()
        }


def views_of(given: Given, plan: Plan | None, simulation: Simulation | None) -> list[View]:
    """Return the views, predicted first. Raises `PlanMismatch` for a trace of another job."""
    views = []
    if simulation is not None:
        stages = range(len(simulation.executed))
        memory, regenerated = ({stage: held(stage) for stage in stages} for held in (simulation.memory, simulation.regenerated))
        timeline = trimmed(simulation.timeline())
        named = {stage: stage for stage in stages}
        layers = _layers(named, plan)
        views.append(View("predicted", "simulated", simulation.step_s, timeline, named, layers, memory, regenerated))
    if given.trace is not None and not (given.trace.simulated and views):
        where, timeline = given.sources["trace"], trimmed(given.trace.timeline)
        rows = shown_rows(timeline, stages_of_rows(given.trace, plan, where))
        name: Literal["predicted", "measured"] = "predicted" if given.trace.simulated else "measured"
        views.append(View(name, f"from {where}", timeline.seconds, timeline, rows, _layers(rows, plan), given.trace.memory))
    return views


def _layers(stages: Mapping[int, int], plan: Plan | None) -> dict[int, str]:
    if plan is None:
        return {}
    return {row: ", ".join(str(entry.layers) for entry in plan.chunks_of(stage)) for row, stage in stages.items()}


def shown_rows(timeline: Timeline, stages: Mapping[int, int]) -> dict[int, int]:
    rows = sorted(timeline.ranks, key=lambda row: (stages[row], row))
    if len(rows) > MOST_ROWS:
        ends_s = {row: max((span.end_s for span in timeline.ranks[row]), default=0.0) for row in rows}
        rows = [max(group, key=ends_s.__getitem__) for _, group in groupby(rows, key=stages.__getitem__)]
    return {row: stages[row] for row in rows}


def trimmed(timeline: Timeline) -> Timeline:
    return Timeline({row: tuple(_trimmed(spans)) for row, spans in timeline.ranks.items()})


def _trimmed(spans: Sequence[Span]) -> Iterator[Span]:
    exposed = sorted(span.start_s for span in spans if kind_of(span) in ("on_demand", "flushed"))
    for span in spans:
        place = bisect_left(exposed, span.start_s)
        yield span._replace(end_s=min([span.end_s, *exposed[place : place + 1]])) if is_wait(span) else span
