"""The settings that are compared: stock Megatron's, each by its fields of TransformerConfig, and ours, each by its plan.

none                                     what ratios refer to
selective, full                          stock's two usual answers
modules {...}, block N                   opponents: the fastest stock setting of no more bytes than ours may be one of them
ours, on demand                          the plan without its windows: what replaying costs if nothing hides it
ours                                     the plan
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from megatron_lynx.anatomy import DENSE, HALVES
from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Gather, Plan, Rule, Windows

MODULES = ("core_attn", "layernorm", "mlp")
"""Stock's `recompute_modules` of a dense layer; the others belong to mixtures of experts and to latent attention."""


@dataclass(frozen=True)
class Candidate:
    """One setting: fields of TransformerConfig, or a plan."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    known_to_fail: str | None = None
    """The reason for which it must not even be tried, if there is one."""

    @property
    def ours(self) -> bool:
        return self.plan is not None


NONE = Candidate("stock none")
SELECTIVE = Candidate("stock selective", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]})
FULL = Candidate("stock full", {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1})


def ours(plan: Plan) -> tuple[Candidate, Candidate]:
    """The plan without its windows, and the plan."""
    return Candidate("ours, on demand", plan=without_windows(plan)), Candidate("ours", plan=plan)


def module_sets(job: Job) -> Iterator[Candidate]:
    """Every other set of `recompute_modules`."""
    for count in range(1, len(MODULES) + 1):
        for modules in combinations(MODULES, count):
            fields = {"recompute_granularity": "selective", "recompute_modules": list(modules)}
            if fields != SELECTIVE.fields:
                yield Candidate(f"stock {' + '.join(modules)}", fields, known_to_fail=_known_to_fail(job, modules))


def blocks(job: Job) -> Iterator[Candidate]:
    """Full recomputation of the first N layers of each stage, from almost all layers down: each holds more than the last."""
    for recomputed in range(len(job.layers_of(0)) - 1, 0, -1):
        fields = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": recomputed}
        yield Candidate(f"stock block {recomputed}", fields)


def without_windows(plan: Plan) -> Plan:
    """The same plan with every replay and every gather on demand."""
    stages = (
        stage.model_copy(update={"ahead_depth": 0, "rules": tuple(_on_demand(rule) for rule in stage.rules)})
        for stage in plan.stages
    )
    return Plan.model_validate(plan.model_copy(update={"stages": tuple(stages)}).model_dump())


def _on_demand(rule: Rule) -> Rule:
    gathers = {
        half: ON_DEMAND
        for half in HALVES
        if getattr(rule.gather, half) is not None and DENSE[half].column_parallel in rule.replay
    }
    return rule.model_copy(update={"windows": Windows(), "gather": Gather.model_validate(gathers)})


def _known_to_fail(job: Job, modules: tuple[str, ...]) -> str | None:
    """Why stock cannot run these modules (seen with megatron-core 0.16.1). Trying would take the machine down with it."""
    if "mlp" in modules and job.model.bias:
        return "stock Megatron recomputes an MLP with linear biases without end, until memory is gone"
    return None
