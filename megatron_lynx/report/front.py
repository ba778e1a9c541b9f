"""Front of plans over several budgets, from the least memory to that of keeping everything, with stock Megatron's settings.

step │ o                                     step time over the memory of the fullest device
     │   o                                   ◇ full
     │      o
     │          o────o────o                  ◇ none
     └────────────────────────── memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from megatron_lynx.advise.today import as_stock
from megatron_lynx.anatomy import HALVES, Half
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, LynxError
from megatron_lynx.plan.plan import Plan, Rule, Stage
from megatron_lynx.plan.stage import ALWAYS
from megatron_lynx.planner import Decision, decide, figures_of, least_memory
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.report.island import Point, PointStage, Treatment
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.stock import FULL, NONE, SELECTIVE, priced
from megatron_lynx.units import GIB


def stages_of(
    plan: Plan,
    simulation: Simulation | None = None,
    memory: Mapping[int, StageMemory] | None = None,
    measured_bytes: Mapping[int, int] | None = None,
) -> list[PointStage]:
    """Return the entries of a plan by stage and chunk, with seconds of the simulation, by default the plan's own.

    `memory`: each stage's peak; by default as stated by the plan.
    """
    held = dict(_planned(plan)) if memory is None else {stage: (each.moment, used_kinds(each)) for stage, each in memory.items()}
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
    hidden_s, exposed_s = entry.predicted.hidden_replay_s, entry.predicted.exposed_replay_s
    if simulation is not None:
        hidden_s, exposed_s = simulation.replays_of(entry.stage, entry.chunk)
    moment, kinds = held.get(entry.stage, ("", {}))
    return PointStage(
        stage=entry.stage,
        chunk=entry.chunk,
        layers=str(entry.layers),
        treatments=[_treatment(plan, entry, rule, half) for rule in entry.rules for half in HALVES],
        offloaded_bytes=0 if entry.offload is None else entry.offload.bytes,
        deferred_bytes=0 if entry.weight_gradients is None else entry.weight_gradients.bytes,
        hidden_replay_s=hidden_s,
        exposed_replay_s=exposed_s,
        memory_bytes=kinds,
        moment=moment.replace("_", " "),
        measured_bytes=measured_bytes.get(entry.stage),
    )


def used_kinds(memory: StageMemory) -> dict[str, int]:
    """Return bytes by kind without zeros, permanent ones first."""
    return {name: size for name, size in memory.kinds.items() if size}


def _treatment(plan: Plan, entry: Stage, rule: Rule, half: Half) -> Treatment:
    section = rule.filling(half)
    replayed = rule.replays(half)
    if rule.checkpoints(half):  # checkpoints name no items
        section = plan.model.sections_of(rule.layers.last)[HALVES.index(half)]
        replayed = section.run_again(whole=rule.feeds(rule.layers.first, half))
    return Treatment(
        layers=str(rule.layers),
        half=half,
        items=[(item, "replay" if item in replayed else "keep") for item in section.names],
        window=_place(plan, entry, rule, half) if replayed else "",
        deferred=[
            f"{linear}: {', '.join(rule.weight_gradients[linear])}"
            for linear in section.linears
            if linear in rule.weight_gradients
        ],
        gather=" / ".join(_by_phase(rule.gather.of(half, "steady"), rule.gather.of(half, "cooldown"))),
    )


def _place(plan: Plan, entry: Stage, rule: Rule, half: Half) -> str:
    if rule.checkpoints(half):
        rest = f", then {wait}" if (wait := rule.goes_on_in(half)) else ""
        return f"{rule.checkpoint_said}{rule.ahead_in_words}{rest}: keeps {plan.kept_input(entry, rule, half)}"
    return " / ".join(_by_phase(rule.windows.of(half, "steady"), rule.windows.of(half, "cooldown")))


def _by_phase(steady: str | None, cooldown: str | None) -> Iterator[str]:
    """Yield one window, or two if cool-down uses another."""
    if steady:
        yield steady
    if cooldown and cooldown != steady:
        yield f"in cool-down {cooldown}"


STOCK = (NONE, SELECTIVE, FULL)
"""Stock settings that need no further parameter."""

Watch = Callable[[int, int], None]
"""Called with the finished and the total number of budgets."""


def plans_over_budgets(job: Job, profile: Profile, budgets: int, watch: Watch) -> Iterator[Point]:
    """Yield a plan for each of `budgets` evenly spaced budgets, without infeasible and repeated ones."""
    least = max(memory.total for memory in least_memory(job, profile))
    most = max(memory.total for memory in memory_of_stages(job.model_copy(update={"policy": "none", "offload_ratio": 0.0})))
    seen: set[tuple[int | None, float]] = set()
    for number in range(budgets):
        budget_bytes = least + (max(most, least) - least) * (number + 1) / budgets
        changed = job.model_copy(update={"budget": Budget(memory_gib=budget_bytes / GIB), "policy": "planned"})
        try:
            found = point(decide(changed, profile), profile, f"{budget_bytes / GIB:.1f} GiB", round(budget_bytes))
        except (ConfigError, Infeasible):
            continue
        finally:
            watch(number + 1, budgets)
        if (key := (found["memory_bytes"], found["step_s"])) not in seen:
            seen.add(key)
            yield found


def point(decision: Decision, profile: Profile, label: str, budget_bytes: int | None, *, shown: bool = False) -> Point:
    figures = figures_of(decision.job, profile, decision.simulation)
    return Point(
        label=label,
        by="plan",
        budget_bytes=budget_bytes,
        memory_bytes=figures.memory_bytes,
        step_s=figures.step_s,
        shown=shown,
        stages=stages_of(decision.plan, decision.simulation, dict(enumerate(decision.memory))),
    )


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
                    hidden_replay_s=None,
                    exposed_replay_s=None,
                    memory_bytes=used_kinds(each),
                    moment=each.moment.replace("_", " "),
                    measured_bytes=None,
                )
                for stage, each in enumerate(price.stages)
            ],
        )
