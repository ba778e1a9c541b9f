"""Builds an island: predicted and measured steps, tables, and the front of plans.

job, costs ──decide──> plan, simulated step, bytes by kind ┐
plan, costs ──rehearse──> simulated step                   ├──> views, tables, tiles
trace of a run, figures of `simulate`, comparison ─────────┘
job, costs ──plans_over_budgets, stock_points──> points
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments import Reading
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner import PlanFigures, as_planned, decide, figures_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.report.front import Watch, plans_over_budgets, point, stages_of, stock_points
from megatron_lynx.report.given import NEEDED, Given
from megatron_lynx.report.island import VERSION, Island, Point, Table, View
from megatron_lynx.report.kinds import KINDS, MEMORY_KINDS, notes_of, subject_of, with_fallbacks
from megatron_lynx.report.tables import (
    Seen,
    allocated_bytes,
    check_outcome,
    exposed_table,
    how_measured,
    launch_tables,
    outcome_table,
    settings_table,
    stage_table,
    tiles_of,
    use_table,
)
from megatron_lynx.report.views import views_of
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.version import __version__


@dataclass(frozen=True)
class Asked:
    """Inputs of a report, and the figures to predict with."""

    given: Given
    job: Job | None
    costs: Profile | None
    reading: Reading | None
    """Launch that the plan was made for."""
    budgets: int
    """Number of plans on the front."""
    watch: Watch


def contents(asked: Asked) -> Island:
    """Return the page's contents. Raises ConfigError, PlanMismatch or Infeasible."""
    given = asked.given
    check_enough(given)
    plan, simulation, own = _predicted(asked)
    if given.outcome is not None and plan is not None:
        check_outcome(given.outcome, plan, given.sources["outcome"])
    drawn = views_of(given, plan, simulation)
    views, seen = [each.view for each in drawn], [each.seen for each in drawn]
    points = [*own, *_front(asked)]
    on_gpus = asked.job is not None and asked.job.cluster.device != "cpu"
    return Island(
        version=VERSION,
        made_by=f"megatron-lynx {__version__}",
        title=", ".join(given.names),
        subject="" if plan is None else subject_of(plan),
        sources=[f"{kind} {source}" for kind, source in given.sources.items()],
        notes=[*notes_of(plan, asked.costs, simulation), *([] if given.measurement is None else how_measured(given.measurement))],
        tiles=list(tiles_of(seen, points, given.outcome, None if plan is None else plan.stages[0].predicted.step_s)),
        kinds=with_fallbacks(KINDS, {subject["kind"] for each in views for subject in each["subjects"]}),
        memory_kinds=with_fallbacks(MEMORY_KINDS, _memory_kinds(views, points)),
        capacity_bytes=asked.job.memory_budget_bytes if asked.job is not None and on_gpus else None,
        views=views,
        points=points,
        tables=list(_tables(asked, seen, own)),
    )


def check_enough(given: Given) -> None:
    """Raise ConfigError if there is nothing to draw, or a run without its plan."""
    simulated = given.trace is not None and given.trace.simulated
    measured = [given.sources[kind] for kind in ("trace", "measurement", "outcome") if kind in given.sources]
    if given.plan is None and measured and not simulated:
        todo = "name that plan as well: megatron-lynx report RUN plan.yaml"
        found = [Problem(where, "no plan beside it", "the plan under which it ran", todo) for where in measured]
        raise ConfigError("a run without a plan", found)
    if not given.sources.keys() & {"plan", "job", "trace", "simulation"}:
        raise ConfigError("there is nothing to draw", [Problem("report", ", ".join(given.sources) or "nothing", NEEDED)])


def _predicted(asked: Asked) -> tuple[Plan | None, Simulation | None, list[Point]]:
    """Return the plan, its simulated step if possible, and its point on the front."""
    given, costs = asked.given, asked.costs
    if given.plan is not None:
        job, simulation, figures = None if asked.job is None else as_planned(asked.job, given.plan), None, None
        if costs is not None:
            reduced = job is not None and job.overlap.gradients
            simulation = rehearse(given.plan, costs, reduced_in_backward=reduced, job=job)
            figures = None if job is None else figures_of(job, costs, simulation)
        measured_bytes = {} if given.outcome is None else allocated_bytes(given.outcome)
        return given.plan, simulation, [_point_of(given.plan, simulation, figures, measured_bytes)]
    if given.job is None:
        return None, None, []
    if costs is None:
        needed, todo = "figures of the cluster, or a profile", "megatron-lynx profile measures one, which --profile takes"
        raise ConfigError("there are no figures to plan with", [Problem("--profile", "none", needed, todo)])
    decision = decide(given.job, costs)
    return decision.plan, decision.simulation, [point(decision, costs, "the plan", None, shown=True)]


def _point_of(plan: Plan, simulation: Simulation | None, figures: PlanFigures | None, measured_bytes: Mapping[int, int]) -> Point:
    """Return the point of a plan from a file. `figures`: of its job, if known, else the plan's own. `measured_bytes`: measured
    device peaks by stage."""
    predicted = plan.stages[0].predicted
    passes_s = predicted.step_s if simulation is None else simulation.step_s
    step_s = None if passes_s is None or predicted.update_s is None else passes_s + predicted.update_s
    memory_bytes = max(entry.predicted.memory_bytes for entry in plan.stages) or None
    return Point(
        label="the plan",
        by="plan",
        budget_bytes=None,
        memory_bytes=memory_bytes if figures is None else figures.memory_bytes,
        step_s=(step_s or 0.0) if figures is None else figures.step_s,
        shown=True,
        stages=stages_of(plan, simulation, measured_bytes=measured_bytes),
    )


def _front(asked: Asked) -> Iterator[Point]:
    if asked.job is not None and asked.costs is not None and asked.budgets:
        yield from plans_over_budgets(asked.job, asked.costs, asked.budgets, asked.watch)
        yield from stock_points(asked.job, asked.costs)


def _memory_kinds(views: list[View], points: list[Point]) -> set[str]:
    over_time = {kind for each in views for row in each["rows"] if row["memory"] is not None for kind in row["memory"]["kinds"]}
    return over_time | {kind for each in points for stage in each["stages"] for kind in stage["memory_bytes"]}


def _tables(asked: Asked, seen: list[Seen], own: list[Point]) -> Iterator[Table]:
    """Yield the page's tables. `own`: the plan's point."""
    given, job, costs, reading = asked.given, asked.job, asked.costs, asked.reading
    today: list[Table] = []
    read: list[Table] = []
    if given.plan is not None and job is not None and costs is not None and reading is not None:
        today, read = ([each] for each in launch_tables(given.plan, job, costs, reading, own[0]))
    yield from today
    if given.outcome is not None:
        yield outcome_table(given.outcome)
    if given.measurement is not None:
        yield settings_table(given.measurement)
    if seen:
        yield stage_table(seen)
    yield from (use_table(each.name, each.timeline, each.labels) for each in seen)
    yield from (exposed_table(each.name, each.timeline, each.labels) for each in seen)
    yield from read
