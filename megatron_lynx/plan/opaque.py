"""Checks of opaque halves (`model.opaque_layers`): their layers exist, and rules keep them whole."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import HALVES
from megatron_lynx.kinds.opaque.section import OPAQUE
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule


def misplaced(plan: PlanContents) -> Iterator[str]:
    """Layers of `model.opaque_layers` that the model does not have, or that have another kind of half."""
    for name, spans in plan.model.opaque_layers.items():
        for span in spans:
            if span.last > plan.model.layers:
                yield f"model.opaque_layers.{name} has {span}, but the model has layers 1-{plan.model.layers}"
            for layer in span if span.last <= plan.model.layers else ():
                if OPAQUE[name] not in (found := plan.model.sections_of(layer)):
                    filled = next(section.name for section in found if section.half == OPAQUE[name].half)
                    yield f"model.opaque_layers.{name} has layer {layer}, where the {OPAQUE[name].half} half is {filled} already"


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """Opaque halves that a rule recomputes or names wrongly, with what to do."""
    for half in HALVES:
        found = {layer: section for layer in rule.layers for section in plan.model.sections_of(layer) if section.half == half}
        affected = {section.name for section in found.values() if section.opaque}
        usual = any(not section.opaque for section in found.values())
        named = ", ".join(sorted(affected))
        if affected and (rule.checkpoints(half) or (rule.checkpoint is not None and not isinstance(rule.checkpoint, str))):
            todo = "checkpoint the other half alone"
            yield f"found {rule.checkpoint_said}, needed {named} kept whole: nobody looks into it; {todo}"
        elif affected and rule.replays(half):
            todo = "give these layers a rule of their own" if usual else "list it under keep"
            yield f"found {', '.join(rule.replays(half))} replayed, needed {named} kept whole: nobody looks into it; {todo}"
        said = [name for name in OPAQUE if name in (*rule.keep, *rule.replay) and OPAQUE[name].half == half]
        if others := [name for name in said if name not in affected]:
            yield f"found {', '.join(others)}, which no layer of the rule has (model.opaque_layers)"
