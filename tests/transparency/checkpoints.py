"""Plans in which layers, or halves of layers, keep their input alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_lynx.plan.plan import Plan

FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
"""Stock's fields; `recompute_num_layers` comes beside them."""


def checkpointed(plan: Plan, checkpoint: Any, layers: Iterable[int] | None = None) -> Plan:
    """The same plan with this checkpoint in these layers, or in all, of which it names no items any more. Neighbours share a
    rule, so that groups of layers may be formed."""
    raw = plan.model_dump(mode="json", exclude_defaults=True)
    halves = {"attention": ("attention",), "mlp": ("mlp",)}.get(
        checkpoint if isinstance(checkpoint, str) else "", ("attention", "mlp")
    )
    for stage in raw["stages"]:
        for rule in stage["rules"]:
            first = int(str(rule["layers"]).partition("-")[0])  # all of a rule are alike
            if layers is None or first in layers:
                rule["checkpoint"] = checkpoint
                _leave_out(rule, plan, first, halves)
        stage["rules"] = _joined(stage["rules"])
    return Plan.model_validate(raw)


def without_copies(plan: Plan) -> Plan:
    """The same plan, in FP8, whose checkpointed halves keep no copy of what their last linear reads."""
    return plan.model_copy(update={"model": plan.model.model_copy(update={"fp8_copies_kept": False})})


def ahead(plan: Plan, *, expert: int = 1, how: Any = True) -> Plan:
    """The same plan in which what checkpointed layers communicate begins ahead. `expert`: ranks that share out experts. `how`: as
    a rule has it."""
    raw = plan.model_dump(mode="json", exclude_defaults=True)
    raw["parallel"]["expert"] = expert
    for rule in (rule for stage in raw["stages"] for rule in stage["rules"] if rule.get("checkpoint")):
        rule["ahead"] = how
    return Plan.model_validate(raw)


def without_beginning(plan: Plan) -> Plan:
    """The same plan in which nothing begins ahead; exchanges of tokens stay windows."""
    raw = plan.model_dump(mode="json", exclude_defaults=True)
    for rule in (rule for stage in raw["stages"] for rule in stage["rules"]):
        rule.pop("ahead", None)
    return Plan.model_validate(raw)


def with_rest_in_wait(plan: Plan, halves: Iterable[str] = ("mlp",)) -> Plan:
    """The same plan in which what comes behind all that checkpointed halves communicate runs again in their first wait."""
    raw = plan.model_dump(mode="json", exclude_defaults=True)
    for stage in raw["stages"]:
        stage["ahead_depth"] = max(1, stage.get("ahead_depth", 0))
        for rule in (rule for rule in stage["rules"] if rule.get("checkpoint")):
            rule["windows"] = {half: f"bwd.{half}.0" for half in halves}
    return Plan.model_validate(raw)


def _leave_out(rule: dict[str, Any], plan: Plan, layer: int, halves: tuple[str, ...]) -> None:
    names = {name for section in plan.model.sections_of(layer) if section.half in halves for name in section.names}
    for key in ("keep", "recompute"):
        rule[key] = [item for item in rule.get(key, ()) if item not in names]
    for key in ("windows", "gather"):
        rule[key] = {half: place for half, place in rule.get(key, {}).items() if half not in halves}


def _joined(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for rule in rules:
        alike = {key: said for key, said in rule.items() if key != "layers"}
        if found and rule.get("checkpoint") and alike == {key: said for key, said in found[-1].items() if key != "layers"}:
            found[-1]["layers"] = f"{str(found[-1]['layers']).partition('-')[0]}-{str(rule['layers']).rpartition('-')[2]}"
        else:
            found.append(rule)
    return found
