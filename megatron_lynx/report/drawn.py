"""The views of a page, each with the figures that stand beside it: the step as it was predicted, and as it was measured.

predicted   a rehearsal; else what `simulate --trace` or `simulate --json` wrote
measured    the trace of a run under the plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.figures import Seen
from megatron_lynx.report.given import Given
from megatron_lynx.report.island import Memory, View
from megatron_lynx.report.match import stages_of_rows
from megatron_lynx.report.trimmed import trimmed
from megatron_lynx.report.views import by_kind, memory_of, view
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.simulator.timeline import Timeline


@dataclass(frozen=True)
class Drawn:
    """A view with the figures that stand beside it."""

    view: View
    seen: Seen


def views_of(given: Given, plan: Plan | None, simulation: Simulation | None) -> list[Drawn]:
    """What there is to see, predicted first. Raises `PlanMismatch` for a trace of another job."""
    return [each for each in (_predicted(given, plan, simulation), _measured(given, plan)) if each is not None]


def _predicted(given: Given, plan: Plan | None, simulation: Simulation | None) -> Drawn | None:
    if simulation is not None:
        stages = {stage: stage for stage in range(len(simulation.executed))}
        memory = {stage: memory_of(simulation, stage) for stage in stages}
        return _drawn("predicted", "simulated", simulation.timeline(), stages, memory, plan, simulation.step_s)
    if given.trace is not None and given.trace.simulated:
        return _traced("predicted", given, plan)
    if given.simulation is not None:
        read = given.simulation
        title = f"simulated, from {given.sources['simulation']}: passes without their halves"
        return _drawn("predicted", title, read.timeline, {row: row for row in read.timeline.ranks}, {}, plan, read.step_s)
    return None


def _measured(given: Given, plan: Plan | None) -> Drawn | None:
    return None if given.trace is None or given.trace.simulated else _traced("measured", given, plan)


def _traced(name: Literal["predicted", "measured"], given: Given, plan: Plan | None) -> Drawn:
    assert given.trace is not None, "asked for only where there is one"
    where, timeline = given.sources["trace"], given.trace.timeline
    memory = {row: by_kind(curve) for row, curve in given.trace.memory.items()}
    return _drawn(name, f"from {where}", timeline, stages_of_rows(given.trace, plan, where), memory, plan, timeline.seconds)


def _drawn(
    name: Literal["predicted", "measured"],
    title: str,
    timeline: Timeline,
    stages: Mapping[int, int],
    memory: Mapping[int, Memory],
    plan: Plan | None,
    step_s: float,
) -> Drawn:
    timeline = trimmed(timeline)
    made = view(name, title, timeline, stages, memory)
    rows = {row["number"]: row for row in made["rows"]}
    return Drawn(
        made,
        Seen(
            name=name,
            step_s=step_s,
            timeline=timeline,
            labels={number: row["label"] for number, row in rows.items()},
            layers={} if plan is None else {number: _layers(plan, row["stage"]) for number, row in rows.items()},
            held_bytes={number: _most(memory[number]) for number in rows if number in memory},
        ),
    )


def _layers(plan: Plan, stage: int) -> str:
    return ", ".join(str(entry.layers) for entry in plan.chunks_of(stage))


def _most(memory: Memory) -> int:
    return max(map(sum, zip(*memory["kinds"].values(), strict=True)), default=0)
