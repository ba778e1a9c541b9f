"""Settings of a comparison: stock Megatron's, by fields of TransformerConfig, and ours, by plan.

none                      baseline of the ratios
selective, full           stock's usual recomputation
modules {...}, block N    opponents: other stock settings that use no more bytes than ours
ours, checkpointed        keeps only each layer's input, as stock full: the same bytes
ours, on demand           the plan with empty waits: the cost of exposed recomputation
ours, no weight gradient deferred
                          the plan with recomputations in waits alone, if it also delays weight gradients
ours                      the plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import combinations
from typing import Any

from megatron_lynx.anatomy import DENSE, HALVES
from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Offload, Plan
from megatron_lynx.plan.rule import Gather, Rule, Windows
from megatron_lynx.stock import FULL as STOCK_FULL
from megatron_lynx.stock import NONE as STOCK_NONE
from megatron_lynx.stock import SELECTIVE as STOCK_SELECTIVE
from megatron_lynx.stock import StockSetting
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.stock.setting import RECOMPUTED, block
from megatron_lynx.testbed.cpu_device import TRANSFORMER_ENGINE

MODULES = tuple(name for name, module in RECOMPUTED.items() if module.halves)
"""Stock's `recompute_modules` of a dense layer. The others apply to experts and latent attention."""


@dataclass(frozen=True)
class Candidate:
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None

    @property
    def ours(self) -> bool:
        return self.plan is not None


def stock(setting: StockSetting) -> Candidate:
    return Candidate(f"stock {setting.name}", setting.fields)


NONE, SELECTIVE, FULL = stock(STOCK_NONE), stock(STOCK_SELECTIVE), stock(STOCK_FULL)


def ours(plan: Plan) -> tuple[Candidate, ...]:
    first, whole = without_deferral(plan), Candidate("ours", plan=plan)
    on_demand = Candidate("ours, on demand", plan=without_windows(first))
    if first == plan:
        return on_demand, whole
    return on_demand, Candidate("ours, no weight gradient deferred", plan=first), whole


def checkpointed(plan: Plan) -> tuple[Candidate, ...]:
    if plan.parallel.userbuffers:
        return ()
    nothing_else = {"ahead_depth": 0, "offload": None, "whole": None}
    stages = (
        stage.model_copy(update={**nothing_else, "rules": (Rule(layers=stage.layers, checkpoint="layer"),)})
        for stage in without_deferral(plan).stages
    )
    return (Candidate("ours, checkpointed", plan=plan.with_stages(stages)),)


def module_sets(job: Job) -> Iterator[Candidate]:
    """Yield stock's sets of recomputed modules. Sets with a norm need Transformer Engine, for local layers as well."""
    names = [name for name in MODULES if name != "layernorm" or find_spec(TRANSFORMER_ENGINE) is not None]
    sets = (StockSetting(modules) for count in range(1, len(names) + 1) for modules in combinations(names, count))
    yield from (stock(setting) for setting in sets if setting != STOCK_SELECTIVE and offered(setting, Facts.of(job)))


def blocks(job: Job) -> Iterator[Candidate]:
    """Yield full recomputation of the first N layers of each stage, N descending, so that each keeps more than the last."""
    for recomputed in range(len(job.layers_of(0)) - 1, 0, -1):
        yield stock(block(recomputed))


def changed(plan: Plan, of_rule: Callable[[Rule], dict[str, Any]] = lambda rule: {}, **of_stage: Any) -> Plan:
    """Return the plan with other fields of every stage and of every rule."""
    return plan.with_stages(
        stage.model_copy(update={**of_stage, "rules": tuple(rule.model_copy(update=of_rule(rule)) for rule in stage.rules)})
        for stage in plan.stages
    )


def without_windows(plan: Plan) -> Plan:
    return changed(plan, _on_demand, ahead_depth=0)


def _on_demand(rule: Rule) -> dict[str, Any]:
    gathers = {
        half: ON_DEMAND
        for half in HALVES
        if getattr(rule.gather, half) is not None and DENSE[half].column_parallel in rule.recompute
    }
    return {"windows": Windows(), "gather": Gather.model_validate(gathers)}


def without_deferral(plan: Plan) -> Plan:
    return changed(plan, lambda rule: {"weight_gradients": {}}, weight_gradients=None)


def offloading_all(plan: Plan) -> Plan:
    return changed(plan, offload=Offload(bytes=2**30, smallest_tensor_bytes=0))
