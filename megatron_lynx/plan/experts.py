"""Checks of layers of experts: their MLP half must be kept whole, their attention half is planned as any other.

    layer of experts     attention half   as the rule says            replays, windows, gathers
                         MLP half         router, dispatch, experts   everything kept; its communication is no window

What a router decides must not be decided again, and its dispatch communicates in the middle of the half: nothing in it may run
ahead of time.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import EXPERTS, HALVES
from megatron_lynx.anatomy.address import BACKWARD_PHASES, WindowAddress, window_at
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.layer_range import LayerRange
from megatron_lynx.plan.rule import Rule


def misplaced(plan: PlanContents) -> Iterator[str]:
    """Layers of `model.moe_layers` that the model does not have."""
    for span in plan.model.moe_layers:
        if span.last > plan.model.layers:
            yield f"model.moe_layers has {span}, but the model has layers 1-{plan.model.layers}"


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """What a rule wrongly asks of the MLP half of layers of experts, in words, with the layers and what to do."""
    affected = [layer for layer in rule.layers if plan.model.has_experts(layer)]
    replayed = rule.replays(EXPERTS.half)
    if affected and replayed:
        found = f"{', '.join(replayed)} replayed in {_spans(affected)}, whose MLP is a mixture of experts (model.moe_layers)"
        yield f"found {found}, needed their MLP half kept whole: give these layers a rule that keeps all of it"
    for name in dict.fromkeys(_places(rule)):
        windows = ((layer, window_at(name, layer)) for layer in rule.layers)
        inside = [layer for layer, window in windows if isinstance(window, WindowAddress) and _lies_in_experts(plan, window)]
        if inside:
            found = f"{name} of {_spans(inside)}, which lies in a mixture of experts (model.moe_layers)"
            yield f"found {found}, needed on_demand or a wait outside experts: give these layers a rule of their own"


def _lies_in_experts(plan: PlanContents, window: WindowAddress) -> bool:
    return window.half == EXPERTS.half and plan.model.has_experts(window.layer)


def _places(rule: Rule) -> Iterator[str]:
    """Every window and gather that a rule names."""
    for half in HALVES:
        for phase in BACKWARD_PHASES:
            yield from (stretch.window for stretch in rule.windows.stretches(half, phase))
            yield from filter(None, (rule.gather.of(half, phase),))


def _spans(layers: list[int]) -> str:
    """`layers 2-4`, or as many ranges as there are."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    spans = [str(LayerRange(first=first, last=last)) for first, last in zip(starts, ends, strict=True)]
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(spans)}"
