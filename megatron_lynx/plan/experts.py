"""Checks of layers of experts: rules name items that their layers have, and windows that exist.

    layer of experts     attention half   as in the rule              recomputation, windows, gathers
                         MLP half         as in the rule; unnamed     recomputation; exchanges of tokens are windows if experts
                         are
                                          items are kept              distributed over ranks (parallel.expert)

A rule may have layers with and without experts if it recomputes no item that only some of them have.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import EXPERTS, EXPERTS_WITH_SHARED, HALVES, MLP, SHARED_EXPERTS
from megatron_lynx.anatomy.address import BACKWARD_PHASES, WindowAddress, is_forward, window_at
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.layer_range import LayerRange
from megatron_lynx.plan.rule import Rule
from megatron_lynx.plan.stage import Stage


def misplaced(plan: PlanContents) -> Iterator[str]:
    """Layers of `model.moe_layers` that the model does not have."""
    for span in plan.model.moe_layers:
        if span.last > plan.model.layers:
            yield f"model.moe_layers has {span}, but the model has layers 1-{plan.model.layers}"
    if plan.parallel.expert > 1 and not plan.model.moe_layers:
        yield f"parallel.expert is {plan.parallel.expert}, but no layer has experts (model.moe_layers)"
    for at, stage in enumerate(plan.stages):
        if stage.experts_hold is not None and (needed := needed_to_fall_back(plan, stage)):
            yield f"stages.{at}.experts_hold is {stage.experts_hold:g}, needed {needed}: or leave it out"


def needed_to_fall_back(plan: PlanContents, stage: Stage) -> str:
    """Why a stage's halves of experts cannot fall back, or ""."""
    if plan.parallel.expert == 1 and plan.model.moe_dispatcher == "alltoall" and not plan.model.moe_overlapped:
        # other plans name one rank, however many there are
        return "experts that are shared out over ranks (parallel.expert): one rank's load never changes"
    if stage.offload is not None and stage.offload.experts:
        return "offload.experts false: what goes to the host was sent before a load is known"
    return ""


def may_fall_back(plan: PlanContents, stage: Stage) -> bool:
    """Whether any half of experts of a stage can free activations when more rows arrive. Older plans have `experts_hold` in other
    stages, too (these halves became checkpoints); there it has no effect.
    """
    return not needed_to_fall_back(plan, stage) and any(_frees_more(plan, stage, layer) for layer in stage.layers)


def _frees_more(plan: PlanContents, stage: Stage, layer: int) -> bool:
    rule, section = stage.rule_for(layer), plan.model.sections_of(layer)[-1]
    return not rule.checkpoints(section.half) and not section.on_rows <= {*rule.recomputed(section)}


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """Items and windows of a rule that its layers of experts, or its other layers, do not have."""
    affected = [layer for layer in rule.layers if plan.model.has_experts(layer)]
    others = [layer for layer in rule.layers if layer not in affected]
    dense = [item for item in MLP.names if item in rule.replay and item not in EXPERTS.names]
    if affected and dense:
        found = f"{', '.join(dense)} replayed in {spans(affected)}, whose MLP is a mixture of experts (model.moe_layers)"
        yield f"found {found}, needed items of {', '.join(EXPERTS.replayable)}: give these layers a rule of their own"
    named = [item for item in EXPERTS_WITH_SHARED.names if item in (*rule.keep, *rule.replay) and item not in MLP.names]
    if others and named:
        found = f"{', '.join(named)} in {spans(others)}, whose MLP is no mixture of experts (model.moe_layers)"
        yield f"found {found}, needed {', '.join(MLP.names)}: give these layers a rule of their own"
    shared = [item for item in named if item in SHARED_EXPERTS]
    if affected and shared and not plan.model.shared_experts:
        yield f"found {', '.join(shared)} in a model without shared experts, needed none of them, or model.shared_experts: true"
    if (
        affected
        and rule.filling(MLP.half) is MLP
        and any(rule.windows.stretches(MLP.half, phase)[1:] for phase in BACKWARD_PHASES)
    ):
        found = f"windows.{MLP.half} of {spans(affected)} in several stretches"
        yield f"found {found}, needed one window: a replay of experts runs at once"
    for name in dict.fromkeys(_places(rule)):
        windows = {layer: window for layer in rule.layers if isinstance(window := window_at(name, layer), WindowAddress)}
        inside = [layer for layer, at in windows.items() if at.half == EXPERTS.half and plan.model.has_experts(at.layer)]
        if inside and not plan.exchanging:
            found = f"{name} of {spans(inside)}, which lies in a mixture of experts (model.moe_layers)"
            yield f"found {found}, needed on_demand or a wait outside experts: give these layers a rule of their own"
        elif inside and plan.parallel.chunks > 1 and is_forward(name) and len(plan.exchanging) < plan.model.layers:
            found = f"{name} of {spans(inside)}, where other layers have no experts (model.moe_layers)"
            yield f"found {found}, needed a wait of a backward: the forward may be another chunk's"


def exchange_in(plan: PlanContents, rule: Rule, name: str) -> bool:
    """Whether a window of this name is an exchange of tokens, in every layer of a rule."""
    windows = [window_at(name, layer) for layer in rule.layers]
    return all(isinstance(one, WindowAddress) and one.half == EXPERTS.half and one.layer in plan.exchanging for one in windows)


def _places(rule: Rule) -> Iterator[str]:
    """Every window and gather that a rule names."""
    for half in HALVES:
        for phase in BACKWARD_PHASES:
            yield from (stretch.window for stretch in rule.windows.stretches(half, phase))
            yield from filter(None, (rule.gather.of(half, phase),))


def spans(layers: list[int]) -> str:
    """`layers 2-4`, or several ranges."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    spans = [str(LayerRange(first=first, last=last)) for first, last in zip(starts, ends, strict=True)]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(spans)}"
