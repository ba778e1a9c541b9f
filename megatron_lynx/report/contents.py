"""Builds an island: predicted and measured steps, tables, and the front of plans.

job, costs ──decide──> plan, simulated step, bytes by kind ┐
plan, costs ──rehearse──> simulated step                   ├──> views, tables, tiles
trace of a run, figures of `simulate`, comparison ─────────┘
job, costs ──plans_over_budgets, stock_points──> points

The front has plans over several budgets, from the least memory to that of keeping everything, and stock Megatron's settings:

step │ o                                     step time over the memory of the fullest device
     │   o                                   ◇ full
     │      o
     │          o────o────o                  ◇ none
     └────────────────────────── memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from megatron_lynx.advise.today import as_stock
from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.compare import verdicts
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, LynxError, Problem
from megatron_lynx.plan.plan import ALWAYS, Plan, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.planner import Decision, PlanFigures, as_planned, decide, figures_of, least_memory
from megatron_lynx.prediction import within_error
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.report.given import NEEDED, Given
from megatron_lynx.report.island import (
    KINDS,
    MEMORY_KINDS,
    VERSION,
    Island,
    Point,
    PointStage,
    Table,
    Treatment,
    with_fallbacks,
)
from megatron_lynx.report.tables import (
    Seen,
    allocated_bytes,
    check_outcome,
    exposed_table,
    outcome_table,
    stage_table,
    tiles_of,
    use_table,
)
from megatron_lynx.report.views import views_of
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock import FULL, NONE, SELECTIVE, priced
from megatron_lynx.units import GIB, format_bytes, format_seconds
from megatron_lynx.version import __version__


def stages_of(
    plan: Plan, simulation: Simulation | None = None, measured_bytes: Mapping[int, int] | None = None
) -> list[PointStage]:
    """Return the entries of a plan by stage and chunk, with seconds of the simulation, by default the plan's own."""
    held = dict(_planned(plan))
    entries = sorted(plan.stages, key=lambda entry: (entry.stage, entry.chunk))
    return [_entry(plan, entry, simulation, held, measured_bytes or {}) for entry in entries]


def _planned(plan: Plan) -> Iterator[tuple[int, tuple[str, dict[str, int]]]]:
    """Yield the fullest moment and its bytes by kind for each stage whose memory the plan states."""
    for entry in plan.stages:
        stated = entry.predicted.memory
        moments = {moment: entry.predicted.held_at(moment) or {} for moment in stated if moment != ALWAYS}
        if moments:
            fullest = max(moments, key=lambda moment: sum(moments[moment].values()))
            yield entry.stage, (fullest, {kind: size for kind, size in moments[fullest].items() if size})


def _entry(
    plan: Plan,
    entry: Stage,
    simulation: Simulation | None,
    held: Mapping[int, tuple[str, dict[str, int]]],
    measured_bytes: Mapping[int, int],
) -> PointStage:
    hidden_s, exposed_s = entry.predicted.hidden_recompute_s, entry.predicted.exposed_recompute_s
    if simulation is not None:
        hidden_s, exposed_s = (simulation.total(entry.stage, name, entry.chunk) for name in ("hidden_s", "exposed_s"))
    moment, kinds = held.get(entry.stage, ("", {}))
    return PointStage(
        stage=entry.stage,
        chunk=entry.chunk,
        layers=str(entry.layers),
        treatments=[_treatment(plan, entry, rule, half) for rule in entry.rules for half in HALVES],
        offloaded_bytes=0 if entry.offload is None else entry.offload.bytes,
        deferred_bytes=0 if entry.weight_gradients is None else entry.weight_gradients.bytes,
        hidden_recompute_s=hidden_s,
        exposed_recompute_s=exposed_s,
        memory_bytes=kinds,
        moment=moment.replace("_", " "),
        measured_bytes=measured_bytes.get(entry.stage),
    )


def _treatment(plan: Plan, entry: Stage, rule: Rule, half: Half) -> Treatment:
    section = rule.filling(half)
    recomputed = rule.recomputed_in(half)
    if rule.checkpoints(half):  # checkpoints name no items
        section = plan.model.sections_of(rule.layers.last)[HALVES.index(half)]
        recomputed = section.run_again(whole=rule.feeds(rule.layers.first, half))
    return Treatment(
        layers=str(rule.layers),
        half=half,
        items=[(item, "recompute" if item in recomputed else "keep") for item in section.names],
        window=_place(plan, entry, rule, half) if recomputed else "",
        deferred=[rule.delayed_said(linear) for linear in section.linears if linear in rule.weight_gradients],
        gather=rule.gather.of(half) or "",
    )


def _place(plan: Plan, entry: Stage, rule: Rule, half: Half) -> str:
    if rule.checkpoints(half):
        rest = f", then {wait}" if (wait := rule.wait_of_rest(half)) else ""
        return f"{rule.checkpoint_said}{rule.ahead_in_words}{rest}: keeps {plan.kept_input(entry, rule, half)}"
    steady, cooldown = rule.windows.of(half, "steady"), rule.windows.of(half, "cooldown")
    return " / ".join(filter(None, (steady, f"in cool-down {cooldown}" if cooldown and cooldown != steady else None)))


STOCK = (NONE, SELECTIVE, FULL)

Watch = Callable[[int, int], None]


def plans_over_budgets(job: Job, profile: Profile, budgets: int, watch: Watch) -> Iterator[Point]:
    """Yield a plan for each of `budgets` evenly spaced budgets, without infeasible and repeated ones."""
    least_bytes = max(memory.total for memory in least_memory(job, profile))
    most_bytes = max(memory.total for memory in memory_of_stages(job.model_copy(update={"policy": "none", "offload_ratio": 0.0})))
    seen: set[tuple[int | None, float]] = set()
    for number in range(budgets):
        budget_bytes = least_bytes + (max(most_bytes, least_bytes) - least_bytes) * (number + 1) / budgets
        changed = job.model_copy(update={"budget": Budget(memory_gib=budget_bytes / GIB), "policy": "planned"})
        try:
            decision = decide(changed, profile)
        except (ConfigError, Infeasible):
            continue
        finally:
            watch(number + 1, budgets)
        plan_point = point_of(decision, profile, f"{budget_bytes / GIB:.1f} GiB", round(budget_bytes))
        if (key := (plan_point["memory_bytes"], plan_point["step_s"])) not in seen:
            seen.add(key)
            yield plan_point


def point_of(decision: Decision, profile: Profile, label: str, budget_bytes: int) -> Point:
    figures = figures_of(decision.job, profile, decision.simulation)
    drawn = shown_point(decision.plan, decision.simulation, figures)
    return Point(**{**drawn, "label": label, "budget_bytes": budget_bytes, "shown": False})


def stock_points(job: Job, profile: Profile) -> Iterator[Point]:
    """Yield stock Megatron's settings for the same job, without offloading; settings that its model lacks are left out."""
    under, added_s = as_stock(job), update_s(job, profile)
    for setting in STOCK:
        try:
            price = priced(under, profile, setting)
        except LynxError:
            continue
        yield Point(
            label=f"stock {setting.name}",
            by="stock",
            budget_bytes=None,
            memory_bytes=price.most_bytes,
            step_s=price.step_s + added_s,
            shown=False,
            stages=[
                PointStage(
                    stage=stage,
                    chunk=0,
                    layers=str(under.layers_on(stage)),
                    treatments=[],
                    offloaded_bytes=0,
                    deferred_bytes=0,
                    hidden_recompute_s=None,
                    exposed_recompute_s=None,
                    memory_bytes={name: size for name, size in memory.kinds.items() if size},
                    moment=memory.moment.replace("_", " "),
                    measured_bytes=None,
                )
                for stage, memory in enumerate(price.stages)
            ],
        )


@dataclass(frozen=True)
class Asked:
    """Inputs of a report, and the figures to predict with."""

    given: Given
    job: Job | None
    costs: Profile | None
    budgets: int
    """Number of plans on the front."""
    watch: Watch


def contents(asked: Asked) -> Island:
    given = asked.given
    check_enough(given)
    plan, simulation, plan_points = _predicted(asked)
    if given.outcome is not None and plan is not None:
        check_outcome(given.outcome, plan, given.sources["outcome"])
    drawn = views_of(given, plan, simulation)
    views, seen = [view for view, _ in drawn], [figures for _, figures in drawn]
    points = list(plan_points)
    if asked.job is not None and asked.costs is not None and asked.budgets:
        points += plans_over_budgets(asked.job, asked.costs, asked.budgets, asked.watch)
        points += stock_points(asked.job, asked.costs)
    memories = [row["memory"]["kinds"] for view in views for row in view["rows"] if row["memory"] is not None]
    memory_kinds = {*chain(*memories, *(stage["memory_bytes"] for plan_point in points for stage in plan_point["stages"]))}
    on_gpus = asked.job is not None and asked.job.cluster.device != "cpu"
    return Island(
        version=VERSION,
        made_by=f"megatron-lynx {__version__}",
        title=", ".join(given.names),
        subject="" if plan is None else subject_of(plan),
        verdict=verdict_of(points, asked.job) if given.measurement is None else " ".join(verdicts(given.measurement)),
        sources=[f"{kind} {source}" for kind, source in given.sources.items()],
        notes=list(notes_of(plan, asked.costs, simulation)),
        tiles=list(tiles_of(seen, points, given.outcome, None if plan is None else plan.stages[0].predicted.step_s)),
        kinds=with_fallbacks(KINDS, {subject["kind"] for view in views for subject in view["subjects"]}),
        memory_kinds=with_fallbacks(MEMORY_KINDS, memory_kinds),
        capacity_bytes=asked.job.memory_budget_bytes if asked.job is not None and on_gpus else None,
        views=views,
        points=points,
        tables=list(_tables(given, seen)),
    )


def check_enough(given: Given) -> None:
    """Raise ConfigError if there is nothing to draw, or a run without its plan."""
    simulated = given.trace is not None and given.trace.simulated
    measured = [given.sources[kind] for kind in ("trace", "measurement", "outcome") if kind in given.sources]
    if given.plan is None and measured and not simulated:
        todo = "name that plan as well: megatron-lynx report RUN plan.yaml"
        problems = [Problem(where, "no plan beside it", "the plan under which it ran", todo) for where in measured]
        raise ConfigError("a run without a plan", problems)
    if not given.sources.keys() & {"plan", "job", "trace"}:
        raise ConfigError("there is nothing to draw", [Problem("report", ", ".join(given.sources) or "nothing", NEEDED)])


def _predicted(asked: Asked) -> tuple[Plan | None, Simulation | None, list[Point]]:
    """Return the plan, its simulated step if possible, and its point on the front."""
    given, costs = asked.given, asked.costs
    if given.plan is not None:
        job, simulation, figures = None if asked.job is None else as_planned(asked.job, given.plan), None, None
        if costs is not None:
            simulation = rehearse(given.plan, costs, job=job)
            figures = None if job is None else figures_of(job, costs, simulation)
        measured_bytes = {} if given.outcome is None else allocated_bytes(given.outcome)
        return given.plan, simulation, [shown_point(given.plan, simulation, figures, measured_bytes)]
    if given.job is None:
        return None, None, []
    if costs is None:
        needed, todo = "figures of the cluster, or a profile", "megatron-lynx profile measures one, which --profile takes"
        raise ConfigError("there are no figures to plan with", [Problem("--profile", "none", needed, todo)])
    decision = decide(given.job, costs)
    figures = figures_of(decision.job, costs, decision.simulation)
    return decision.plan, decision.simulation, [shown_point(decision.plan, decision.simulation, figures)]


def shown_point(
    plan: Plan, simulation: Simulation | None, figures: PlanFigures | None, measured_bytes: Mapping[int, int] | None = None
) -> Point:
    """Return the point of the plan that the page shows. `figures`: of its job, if known, else the plan's own. `measured_bytes`:
    measured device peaks by stage."""
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
        stages=stages_of(plan, simulation, measured_bytes),
    )


def _tables(given: Given, seen: list[Seen]) -> Iterator[Table]:
    if given.outcome is not None:
        yield outcome_table(given.outcome)
    if seen:
        yield stage_table(seen)
    yield from (use_table(view.name, view.timeline, view.labels) for view in seen)
    yield from (exposed_table(view.name, view.timeline, view.labels) for view in seen)


def subject_of(plan: Plan) -> str:
    model, layout, batch = plan.model, plan.parallel, plan.batch
    chunks = f" with {layout.chunks} chunks each" if layout.chunks > 1 else ""
    sequence = " with sequence parallelism" if layout.sequence_parallel else ""
    head = "" if plan.head is None else f"; the head in {plan.head.pieces} pieces (inexact)"
    return (
        f"{model.layers} layers of {model.hidden}, sequence {model.seq}; tensor {layout.tensor}{sequence}, "
        f"pipeline {layout.pipeline}{chunks}; {batch.microbatches} micro-batches of {batch.micro} a step{head}"
    )


def verdict_of(points: Sequence[Point], job: Job | None) -> str:
    """Return the plan's step and bytes against those of the fastest stock setting that fits; empty without stock's points."""
    shown = next((drawn for drawn in points if drawn["shown"]), None)
    baselines = [setting for setting in points if setting["by"] == "stock"]
    if job is None or shown is None or not shown["step_s"] or not baselines:
        return ""
    budget_bytes = job.memory_budget_bytes
    names = ", ".join(setting["label"] for setting in baselines)
    fitting = [setting for setting in baselines if (setting["memory_bytes"] or 0) <= budget_bytes]
    if not fitting:
        return f"Simulated: {_in_figures(shown)}; of {names} none fits {format_bytes(budget_bytes)}."
    best = min(fitting, key=lambda setting: setting["step_s"])
    saved = 1 - shown["step_s"] / best["step_s"]
    difference = f"{abs(saved):.1%} {'less' if saved > 0 else 'more'}".replace("%", " %")
    unsure = within_error(shown["step_s"], best["step_s"], experts=job.model.experts is not None)
    return (
        f"Simulated: {_in_figures(shown)}. That is {difference} than the fastest of {names} that fits "
        f"{format_bytes(budget_bytes)}: {_in_figures(best)}. {unsure}"
    ).rstrip()


def _in_figures(shown: Point) -> str:
    held = "" if shown["memory_bytes"] is None else f" in {format_bytes(shown['memory_bytes'])}"
    return f"{shown['label']} takes {format_seconds(shown['step_s'])} a step{held}"


def notes_of(plan: Plan | None, costs: Profile | None, simulation: Simulation | None) -> Iterator[str]:
    if plan is not None:
        note = f": {plan.provenance.note}" if plan.provenance.note else ""
        yield f"The plan was made by {plan.provenance.made_by}{note}."
    if costs is not None:
        how = "measured on" if costs.source.how == "measured" else "computed from the figures of"
        yield f"Predicted seconds are from a profile that was {how} {costs.source.machine}."
    elif plan is not None:
        yield "There were no figures to simulate the plan with: give its profile, or --job."
    if simulation is not None and simulation.host_bound:
        stages = ", ".join(str(load.stage) for load in simulation.host_bound)
        yield f"Host-bound stages: {stages}. There the device waits for Python, and hiding recomputation gains nothing."
    if plan is not None and plan.schedule == "double_buffered":
        yield "The pipeline is never flushed: the schedule is a whole run of several batches; gradients are one update old."
