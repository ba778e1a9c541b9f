"""The settings that are compared: stock Megatron's, each by its fields of TransformerConfig, and ours, each by its plan.

none                                     what ratios refer to
selective, full                          stock's two usual answers
modules {...}, offload {...}, block N    opponents: the fastest stock setting of no more bytes than ours may be one of them
ours, checkpointed                       every layer keeps its input alone, as under stock full, whose bytes it holds
ours, on demand                          the plan without what fills waits: what replaying costs if nothing hides it
ours, no weight gradient deferred        the same plan with its replays in windows, and nothing else in waits (if it defers any)
ours                                     the plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from megatron_lynx.anatomy import DENSE, HALVES, PASSES, Pass
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, window_name
from megatron_lynx.config.job import Job
from megatron_lynx.plan import weight_gradients
from megatron_lynx.plan.plan import Gather, Offload, Plan, Rule, Stage, WeightGradients, Windows
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock import FULL as STOCK_FULL
from megatron_lynx.stock import NONE as STOCK_NONE
from megatron_lynx.stock import SELECTIVE as STOCK_SELECTIVE
from megatron_lynx.stock import StockSetting
from megatron_lynx.stock.legality import Facts, fails, not_launched
from megatron_lynx.stock.modules import RECOMPUTED
from megatron_lynx.stock.rival import module_sets as offered_sets
from megatron_lynx.stock.setting import block

MODULES = tuple(module.name for module in RECOMPUTED if module.sections)
"""Stock's `recompute_modules` of a dense layer; the others belong to mixtures of experts and to latent attention."""


@dataclass(frozen=True)
class Candidate:
    """One setting: fields of TransformerConfig, or a plan."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    known_to_fail: str | None = None
    """The reason for which it must not even be tried, if there is one."""
    offloads: bool = False
    """Whether stock Megatron's own offloading is on. On a CPU its copies run where they are asked for, beside nothing: they are
    counted, and their seconds would say nothing."""

    @property
    def ours(self) -> bool:
        return self.plan is not None


def stock(setting: StockSetting, known_to_fail: str | None = None) -> Candidate:
    """One of stock's."""
    return Candidate(f"stock {setting.name}", setting.fields, known_to_fail=known_to_fail, offloads=bool(setting.offload))


NONE, SELECTIVE, FULL = stock(STOCK_NONE), stock(STOCK_SELECTIVE), stock(STOCK_FULL)


def ours(plan: Plan) -> tuple[Candidate, ...]:
    """The plan with nothing in its waits, with replays, and with weight gradients, too, if it defers any: the plan itself."""
    first, whole = without_deferral(plan), Candidate("ours", plan=plan)
    on_demand = Candidate("ours, on demand", plan=without_windows(first))
    if first == plan:
        return on_demand, whole
    return on_demand, Candidate("ours, no weight gradient deferred", plan=first), whole


def checkpointed(plan: Plan) -> tuple[Candidate, ...]:
    """A plan that keeps what stock's full recomputation does, and repeats less of it; none where no layer may run again whole."""
    if plan.parallel.userbuffers:
        return ()
    nothing_else = {"ahead_depth": 0, "offload": None, "whole": None}
    stages = (
        stage.model_copy(update={**nothing_else, "rules": (Rule(layers=stage.layers, checkpoint="layer"),)})
        for stage in without_deferral(plan).stages
    )
    return (Candidate("ours, checkpointed", plan=plan.with_stages(stages)),)


def module_sets(job: Job) -> Iterator[Candidate]:
    """Every other set of `recompute_modules`, whether it runs or not."""
    facts = Facts.of(job)
    for count in range(1, len(MODULES) + 1):
        for modules in combinations(MODULES, count):
            setting = StockSetting(recompute=modules)
            if setting != STOCK_SELECTIVE:
                yield stock(setting, fails(setting, facts))


def offload_sets(job: Job) -> Iterator[Candidate]:
    """Every set of `offload_modules` that differs from the others, alone and with `recompute_modules`. Tensors are as small here
    as their model, so Megatron is told to offload smaller ones, too."""
    least = max(1, LayerShape.of(job).input_bytes // job.model.element_bytes // 4)
    for setting in offered_sets(job, least=least):
        if setting.offload:
            candidate = stock(setting)
            candidate.fields["min_offloaded_tensor_size"] = least
            yield candidate


def no_offloading(job: Job) -> str | None:
    """Why stock Megatron offloads nothing of this job; None where it does."""
    return not_launched(StockSetting(offload=("core_attn",)), Facts.of(job))


def blocks(job: Job) -> Iterator[Candidate]:
    """Full recomputation of the first N layers of each stage, from almost all layers down: each holds more than the last."""
    for recomputed in range(len(job.layers_of(0)) - 1, 0, -1):
        yield stock(block(recomputed))


def without_windows(plan: Plan) -> Plan:
    """The same plan with every replay and every gather on demand."""
    return plan.with_stages(
        stage.model_copy(update={"ahead_depth": 0, "rules": tuple(map(_on_demand, stage.rules))}) for stage in plan.stages
    )


def with_offload(plan: Plan, offload: Offload) -> Plan:
    """The same plan; every chunk sends so much of each micro-batch that waits for its backward to the host."""
    return plan.with_stages(stage.model_copy(update={"offload": offload}) for stage in plan.stages)


def without_deferral(plan: Plan) -> Plan:
    """The same plan with every weight gradient computed where stock computes it."""
    return plan.with_stages(_undeferred(stage) for stage in plan.stages)


def _undeferred(stage: Stage) -> Stage:
    rules = tuple(rule.model_copy(update={"weight_gradients": {}}) for rule in stage.rules)
    return stage.model_copy(update={"weight_gradients": None, "rules": rules})


def _on_demand(rule: Rule) -> Rule:
    gathers = {
        half: ON_DEMAND
        for half in HALVES
        if getattr(rule.gather, half) is not None and DENSE[half].column_parallel in rule.replay
    }
    return rule.model_copy(update={"windows": Windows(), "gather": Gather.model_validate(gathers)})


PLENTY = 1 << 30


def deferring(
    plan: Plan, linears: Sequence[str] = (), chosen: Callable[[str], bool] = lambda wait: True, most_bytes: int = PLENTY
) -> Plan:
    """The same plan, in which these linears, or all, defer theirs into those of the chosen waits that come for them."""
    return plan.with_stages(_stage(plan, stage, linears, chosen, most_bytes) for stage in plan.stages)


def _stage(plan: Plan, stage: Stage, linears: Sequence[str], chosen: Callable[[str], bool], most_bytes: int) -> Stage:
    rules = []
    for rule in stage.rules:
        waits = {}
        for linear in linears or [linear for half in HALVES for linear in plan.model.halves[half].linears]:
            if some := tuple(wait for wait in _waits(plan) if chosen(wait) and _comes(plan, stage, rule, linear, wait)):
                waits[linear] = some
        rules.append(rule.model_copy(update={"weight_gradients": waits}))
    bound = WeightGradients(bytes=most_bytes) if any(rule.weight_gradients for rule in rules) else None
    return stage.model_copy(update={"rules": tuple(rules), "weight_gradients": bound})


def _comes(plan: Plan, stage: Stage, rule: Rule, linear: str, wait: str) -> bool:
    asked = rule.model_copy(update={"weight_gradients": {linear: (wait,)}})
    return not list(weight_gradients.problems(plan, stage, asked, timetable_of(plan, stage.stage)))


def _waits(plan: Plan) -> Iterator[str]:
    yield RECV_BACKWARD
    sliced = plan.parallel.sequence_parallel
    passes: tuple[Pass, ...] = PASSES
    for passing in passes:
        for half in HALVES:
            for ordinal in range(len(plan.model.halves[half].collectives(passing, sliced))):
                yield from (window_name(passing, half, ordinal, above) for above in (0, 1, -1))
