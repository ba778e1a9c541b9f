"""The page, a file without scripts: predicted and measured steps, tables, and plans over budgets beside stock's settings.

It looks the same without a network. A figure is `<data value="EXACT">`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from io import StringIO
from pathlib import Path
from typing import Literal

from rich.console import Console, RenderableType

from megatron_lynx.advise.today import as_stock
from megatron_lynx.anatomy import HALVES
from megatron_lynx.beside import Watch
from megatron_lynx.compare import verdicts
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, LynxError, Problem
from megatron_lynx.plan.explanation import explanation
from megatron_lynx.plan.plan import ALWAYS, Plan
from megatron_lynx.planner import PlanFigures, as_planned, decide, figures_of, leanest
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.report.drawing import (
    MEMORY,
    SPANS,
    Device,
    Point,
    View,
    bars_of,
    colours,
    devices_drawn,
    legend,
    part_of,
    points_drawn,
    step_drawn,
    views_of,
)
from megatron_lynx.report.given import NEEDED, Given
from megatron_lynx.report.tables import (
    Cell,
    Table,
    Tile,
    Unit,
    allocated_bytes,
    check_outcome,
    outcome_table,
    points_table,
    stage_table,
    tiles_of,
    use_table,
)
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock import FULL, NONE, SELECTIVE, priced
from megatron_lynx.stock.price import least_bytes
from megatron_lynx.stock.rival import SimulatedRow, verdict
from megatron_lynx.units import GIB, format_bytes, format_seconds
from megatron_lynx.version import __version__


def devices_of(plan: Plan, measured_bytes: Mapping[int, int]) -> Iterator[Device]:
    for stage in range(plan.parallel.pipeline):
        predicted = plan.chunks_of(stage)[0].predicted
        moments = {moment: predicted.held_at(moment) or {} for moment in predicted.memory if moment != ALWAYS}
        fullest = max(moments, key=lambda moment: sum(moments[moment].values()), default="")
        kinds = {kind: size for kind, size in moments.get(fullest, {}).items() if size}
        if kinds or stage in measured_bytes:
            yield Device(stage, fullest.replace("_", " "), kinds, measured_bytes.get(stage))


def point_of(plan: Plan, simulation: Simulation | None, figures: PlanFigures | None, label: str = "the plan") -> Point:
    predicted = plan.stages[0].predicted
    passes_s = predicted.step_s if simulation is None else simulation.step_s
    step_s = None if passes_s is None or predicted.update_s is None else passes_s + predicted.update_s
    memory_bytes = max(entry.predicted.memory_bytes for entry in plan.stages) or None
    rules = [rule for entry in plan.stages for rule in entry.rules]
    items = (item for rule in rules for half in HALVES for item in rule.recomputed_in(half))
    whole = (f"whole {half}" for rule in rules for half in HALVES if rule.checkpoints(half))
    return Point(
        label,
        "plan",
        (step_s or 0.0) if figures is None else figures.step_s,
        memory_bytes if figures is None else figures.memory_bytes,
        shown=label == "the plan",
        hidden_s=max(_recomputed_s(plan, simulation, "hidden")),
        exposed_s=max(_recomputed_s(plan, simulation, "exposed")),
        recomputed=", ".join(dict.fromkeys([*whole, *items])) or "nothing",
        offloaded_bytes=max(0 if entry.offload is None else entry.offload.bytes for entry in plan.stages),
    )


def _recomputed_s(plan: Plan, simulation: Simulation | None, which: Literal["hidden", "exposed"]) -> Iterator[float]:
    for stage in range(plan.parallel.pipeline):
        if simulation is not None:
            yield simulation.total(stage, f"{which}_s")
        else:
            yield sum(getattr(entry.predicted, f"{which}_recompute_s") for entry in plan.chunks_of(stage))


STOCK = (NONE, SELECTIVE, FULL)


def plans_over_budgets(job: Job, profile: Profile, budgets: int, watch: Watch) -> Iterator[Point]:
    least = leanest(job, profile).memory_bytes
    most = least_bytes(job, NONE)
    seen: set[tuple[int | None, float]] = set()
    for number in range(budgets):
        budget_bytes = least + (max(most, least) - least) * (number + 1) / budgets
        changed = job.model_copy(update={"budget": Budget(memory_gib=budget_bytes / GIB), "policy": "planned"})
        try:
            decision = decide(changed, profile)
        except (ConfigError, Infeasible):
            continue
        finally:
            watch(number + 1, budgets)
        found = point_of(decision.plan, decision.simulation, decision.figures, f"{budget_bytes / GIB:.1f} GiB")
        if (key := (found.memory_bytes, found.step_s)) not in seen:
            seen.add(key)
            yield found._replace(budget_bytes=round(budget_bytes))


def stock_points(job: Job, profile: Profile) -> Iterator[Point]:
    under, added_s = as_stock(job), update_s(job, profile)
    for setting in STOCK:
        with suppress(LynxError):
            price = priced(under, profile, setting)
            flags = " ".join(setting.flags)
            yield Point(f"stock {setting.name}", "stock", price.step_s + added_s, price.most_bytes, recomputed=flags)


def report(given: Given, job: Job | None, costs: Profile | None, budgets: int = 0, watch: Watch = lambda done, of: None) -> str:
    check_enough(given)
    plan, simulation, points = _predicted(given, job, costs)
    if given.outcome is not None and plan is not None:
        check_outcome(given.outcome, plan, given.sources["outcome"])
    views = views_of(given, plan, simulation)
    if job is not None and costs is not None and budgets:
        points += plans_over_budgets(job, costs, budgets, watch)
        points += stock_points(job, costs)
    answer = verdict_of(points, job) if given.measurement is None else " ".join(verdicts(given.measurement))
    stated_s = None if plan is None else plan.stages[0].predicted.step_s
    devices = [] if plan is None else list(devices_of(plan, allocated_bytes(given.outcome)))
    budget_bytes = job.memory_budget_bytes if job is not None and job.cluster.device != "cpu" else None
    body = [heading(", ".join(given.names), answer)]
    body.append(tiles(tiles_of(views, points, given.outcome, stated_s)))
    body += map(step, views)
    if devices:
        kinds = {kind for device in devices for kind in device.kinds}
        body += ["<h2>Memory of devices</h2>", legend(MEMORY, kinds), devices_drawn(devices, budget_bytes)]
    if len(points) > 1:
        body += ["<h2>Plans over budgets</h2>", points_drawn(points, budget_bytes), table(points_table(points))]
    body.append("<h2>Figures</h2>")
    body += [] if given.outcome is None else [table(outcome_table(given.outcome))]
    body += [table(stage_table(views))] if views else []
    body += [table(use_table(view)) for view in views]
    if plan is not None:
        body += ["<h2>The plan, layer by layer</h2>", preformatted(explanation(plan))]
    sources = (f"{kind} {source}" for kind, source in given.sources.items())
    body += ["<h2>About this page</h2>", bullets([*notes_of(plan, costs), *sources, f"megatron-lynx {__version__}"])]
    return page(", ".join(given.names), body)


def check_enough(given: Given) -> None:
    """Raise ConfigError if there is nothing to draw, or a run without its plan."""
    simulated = given.trace is not None and given.trace.simulated
    measured = [given.sources[kind] for kind in ("trace", "measurement", "outcome") if kind in given.sources]
    if given.plan is None and measured and not simulated:
        todo = "name that plan as well: megatron-lynx report RUN plan.yaml"
        problems = [Problem(where, "no plan named with it", "the plan under which it ran", todo) for where in measured]
        raise ConfigError("a run without a plan", problems)
    if not given.sources.keys() & {"plan", "job", "trace"}:
        raise ConfigError("there is nothing to draw", [Problem("report", ", ".join(given.sources) or "nothing", NEEDED)])


def _predicted(given: Given, asked: Job | None, costs: Profile | None) -> tuple[Plan | None, Simulation | None, list[Point]]:
    if given.plan is not None:
        job, simulation, figures = None if asked is None else as_planned(asked, given.plan), None, None
        if costs is not None:
            simulation = rehearse(given.plan, costs, job=job, whole=True)
            figures = None if job is None else figures_of(job, costs, simulation)
        return given.plan, simulation, [point_of(given.plan, simulation, figures)]
    if given.job is None:
        return None, None, []
    if costs is None:
        needed, todo = "figures of the cluster, or a profile", "megatron-lynx profile measures one, which --profile takes"
        raise ConfigError("there are no figures to plan with", [Problem("--profile", "none", needed, todo)])
    decision = decide(given.job, costs)
    return decision.plan, decision.simulation, [point_of(decision.plan, decision.simulation, decision.figures)]


def verdict_of(points: Sequence[Point], job: Job | None) -> str:
    """The plan against the fastest stock setting that fits the job's budget; empty without either."""
    rows = [
        SimulatedRow(at.label, StepRange.known(at.step_s), at.memory_bytes or 0, flags=(at.recomputed,), ours=at.shown)
        for at in points
        if at.by == "stock" or (at.shown and at.step_s)
    ]
    if job is None or {row.ours for row in rows} != {True, False}:
        return ""
    return f"Simulated: {verdict(rows, job.memory_budget_bytes, experts=job.model.experts is not None)}"


def notes_of(plan: Plan | None, costs: Profile | None) -> Iterator[str]:
    if costs is not None:
        how = "measured on" if costs.source.how == "measured" else "computed from the figures of"
        yield f"Predicted seconds are from a profile that was {how} {costs.source.machine}."
    elif plan is not None:
        yield "There were no figures to simulate the plan with: give its profile, or --job."


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Iterable[str]) -> str:
    styles = (Path(__file__).parent / "page.css").read_text(encoding="utf-8") + colours()
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
    head += f"<title>{escape(title)} - megatron-lynx report</title>\n<style>\n{styles}</style>"
    lines = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{lines}\n</body></html>\n'


def heading(title: str, answer: str) -> str:
    return f'<h1>{escape(title)}</h1><p class="verdict">{escape(answer)}</p>'


def bullets(lines: Iterable[str]) -> str:
    return f'<ul class="hint">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def preformatted(answer: RenderableType) -> str:
    file = StringIO()
    Console(file=file, width=150).print(answer)
    return f"<pre>{escape(file.getvalue())}</pre>"


def tiles(shown: Iterable[Tile]) -> str:
    return f'<div class="tiles">{"".join(map(_tile, shown))}</div>'


def _tile(tile: Tile) -> str:
    predicted, measured = (_cell(value, tile.unit) for value in (tile.predicted, tile.measured))
    shown, said = (predicted, "predicted") if tile.measured is None else (measured, "measured")
    if tile.measured is not None and tile.predicted is not None:
        said += f"; predicted {predicted}"
        if tile.unit != "share" and tile.measured:
            said += f" ({(tile.predicted / tile.measured - 1) * 100:+.1f} %)"
    return f'<div class="tile" title="{escape(tile.note)}">{escape(tile.label)}<b>{shown}</b>{said}</div>'


def step(view: View) -> str:
    used = {kind for row in view.stages for kind, _ in bars_of(view.timeline.ranks[row])}
    part, more = part_of(view), ""
    if part is not None:
        more = " In the whole step, heights are shares of time; below it a part from its middle, bar by bar."
    hint = "Lanes: compute, communication, copies, and bytes of the layers (green: recomputed)."
    hint = f"{view.title.capitalize()}. {hint}{more} For any other part: simulate --trace and ui.perfetto.dev."
    pictures = step_drawn(view, single=part is None) + ("" if part is None else step_drawn(view, part, single=True))
    return f'<h2>One step, {view.name}</h2>{legend(SPANS, used)}<p class="hint">{escape(hint)}</p>{pictures}'


def table(shown: Table) -> str:
    units = list(shown.columns.values())
    head = "".join(f"<th{_side(unit)}>{escape(label)}</th>" for label, unit in shown.columns.items())
    rows = (
        "".join(f"<td{_side(unit)}>{_cell(cell, unit)}</td>" for cell, unit in zip(row, units, strict=True)) for row in shown.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    found = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if shown.rows else "None."
    note = f'<h3>{escape(shown.title)}</h3><p class="hint">{escape(shown.note)}</p>'
    return f'{note}<div class="scroller" id="{shown.id}">{found}</div>'


def _side(unit: Unit) -> str:
    return "" if unit == "text" else ' class="number"'


def _cell(value: Cell, unit: Unit) -> str:
    if value is None:
        return "&ndash;"
    if isinstance(value, str):
        return escape(value)
    how: dict[str, Callable[[float], str]]
    how = {"s": format_seconds, "bytes": format_bytes, "share": lambda share: f"{100 * share:.0f} %"}
    return f'<data value="{value!r}">{how.get(unit, "{:.4g}".format)(value)}</data>'
