"""The front of plans: for budgets between the least memory and all that keeping everything takes, the plan that is made for each.

step │ o                                     what the fullest device holds, and the step; beside them stock Megatron's settings
     │   o                                   ◇ full
     │      o
     │          o────o────o                  ◇ none
     └────────────────────────── memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_lynx.advise.today import as_stock
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible, LynxError
from megatron_lynx.planner import Decision, decide, figures_of, least_memory
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.report.island import Point, PointStage
from megatron_lynx.report.treatments import stages_of, used_kinds
from megatron_lynx.stock import FULL, NONE, SELECTIVE, priced
from megatron_lynx.units import GIB

STOCK = (NONE, SELECTIVE, FULL)
"""Megatron's own settings, which need no further figure."""

Watch = Callable[[int, int], None]
"""Is told how many of how many budgets are done."""


def plans_over_budgets(job: Job, profile: Profile, budgets: int, watch: Watch) -> Iterator[Point]:
    """A plan for each of so many budgets, evenly spaced. Budgets for which there is none are left out, equal plans stay one."""
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
    """A decision as a point of the front."""
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
    """Stock Megatron's settings for the same job, nothing offloaded. Those that its kind of model does not have are left out."""
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
