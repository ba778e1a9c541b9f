"""Checks of plans with captured graphs (`model.captured`): rules must not change the modules in a graph.

attention, mlp    the half is kept whole, none of its weight gradients is delayed, and the layer is no checkpoint
moe_router        of a layer of experts only items between dispatch and combine may be recomputed
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import MLP, Section
from megatron_lynx.kinds.captured import ROUTER
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule

IN_GRAPH = "runs as a captured graph (model.captured)"


def misplaced(plan: PlanContents) -> Iterator[str]:
    """Facts of the launch that do not go with captured graphs."""
    model = plan.model
    if not model.captured:
        return
    if model.captured != tuple(dict.fromkeys(model.captured)):
        yield f"model.captured is {', '.join(model.captured)}, needed each once"
    if "moe_preprocess" in model.captured and ROUTER not in model.captured:
        yield "model.captured has moe_preprocess, needed moe_router beside it, as Megatron does"
    for name, found, needed in (
        ("model.moe_overlapped", model.moe_overlapped, False),
        ("schedule", plan.schedule, "flush"),
        ("model.mtp", model.mtp, 0),
        ("parallel.userbuffers", plan.parallel.userbuffers, False),
    ):
        if found != needed:
            yield f"{name} is {found}, needed {needed} beside captured graphs (model.captured): nothing else was tried"


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """Requests of a rule that do not go with captured graphs."""
    if not plan.model.captured:
        return
    sections = dict.fromkeys(section for layer in rule.layers for section in plan.model.sections_of(layer))
    for section in sections:
        yield from _asked_of(rule, section)
    if (rule.checkpoint is not None and not isinstance(rule.checkpoint, str)) or rule.checkpoint == "layer":
        yield f"{rule.checkpoint_said}, needed one half or none: a part of the layer {IN_GRAPH}"


def _asked_of(rule: Rule, section: Section) -> Iterator[str]:
    if section.captured:
        deferred = [linear for linear in section.linears if linear in rule.weight_gradients]
        if asked := [*rule.replays(section.half), *deferred]:
            yield f"found {', '.join(asked)} replayed or deferred, needed the {section.half} half kept whole: it {IN_GRAPH}"
        if rule.checkpoint == section.half:
            yield f"{rule.checkpoint_said}, needed the other half or none: it {IN_GRAPH}"
    elif section.apart:
        deferred = [linear for linear in section.linears if linear in rule.weight_gradients]
        if asked := [*(item for item in section.apart if item in rule.replay), *deferred]:
            needed = f"none but {', '.join(section.replayable)} replayed, and none deferred"
            yield f"found {', '.join(asked)} replayed or deferred, needed {needed}: the router {IN_GRAPH}"
        if rule.checkpoint == MLP.half:
            yield f"{rule.checkpoint_said}, needed attention or none: the router {IN_GRAPH}"
