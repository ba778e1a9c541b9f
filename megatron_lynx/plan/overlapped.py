"""Checks of plans with overlapped exchanges of experts (`model.moe_overlapped`).

Megatron's combined schedule interleaves nodes of a forward and a backward, and waits for no exchange: there are no windows, not
even of tensor-parallel collectives, and recomputation is on demand, where backward enters the node. A layer of experts has four
nodes:

    attention, norm, router, shared experts │ dispatch │ rows sorted, experts, rows sorted back │ combine, residual
    └ recomputed, or a checkpoint                        └ recomputed
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.anatomy import HALVES, MLP
from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND
from megatron_lynx.kinds.opaque.section import IN_NODES
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule

BESIDE = "beside overlapped exchanges of experts (model.moe_overlapped)"


def misplaced(plan: PlanContents) -> Iterator[str]:
    """Facts of the launch that do not go with overlapped exchanges."""
    if not plan.model.moe_overlapped:
        return
    layout, model = plan.parallel, plan.model
    if not model.moe_layers:
        yield "model.moe_overlapped is true, but no layer has experts (model.moe_layers)"
    if layout.pipeline > 1 and layout.chunks == 1:
        yield f"parallel.chunks is 1, needed several in a pipeline {BESIDE}, as Megatron does"
    for name, found, needed in (
        ("parallel.expert", layout.expert, 1),
        ("schedule", plan.schedule, "flush"),
        ("head", None if plan.head is None else f"in {plan.head.pieces} pieces", None),
    ):
        if found != needed:
            yield f"{name} is {found}, needed {'none' if needed is None else needed} {BESIDE}: nothing else was tried"
    if other := [name for name in model.opaque_layers if name not in IN_NODES]:
        needed = f"none but {', '.join(IN_NODES)}"
        yield f"model.opaque_layers has {', '.join(other)}, needed {needed} {BESIDE}: no others were run in its nodes"
    for entry in plan.stages:
        for name in ("weight_gradients", "whole"):
            if getattr(entry, name) is not None:
                yield f"{plan.place_of(entry)}.{name} is given, needed none {BESIDE}"
        if layout.pipeline > 1 and entry.offload is not None and entry.offload.pace_bytes is not None:
            why = "with several stages most micro-batches wait for their backward"
            yield f"{plan.place_of(entry)}.offload.pace_bytes is given, needed none {BESIDE}: {why}"
        elif entry.offload is not None and entry.offload.half_by_half == "all":
            yield f"{plan.place_of(entry)}.offload.half_by_half is all, needed at_once {BESIDE}: there is none but these"


def problems(plan: PlanContents, rule: Rule) -> Iterator[str]:
    """Requests of a rule that do not go with overlapped exchanges."""
    if not plan.model.moe_overlapped:
        return
    places = [place.of(half, phase) for place in (rule.windows, rule.gather) for half in HALVES for phase in BACKWARD_PHASES]
    if ahead := sorted({str(place) for place in places} - {str(ON_DEMAND), str(None)}):
        yield f"found {', '.join(ahead)}, needed on_demand {BESIDE}: nothing waits for an exchange"
    section = next((plan.model.sections_of(layer)[1] for layer in rule.layers if plan.model.has_experts(layer)), None)
    if section is None:
        return
    if rule.checkpoints(MLP.half):
        yield f"{rule.checkpoint_said}, needed attention or none {BESIDE}: rows would travel again"
    if apart := [item for item in section.apart if item in rule.replay]:
        needed = f"none but {', '.join(section.replayable)}"
        yield f"found {', '.join(apart)} replayed in layers of experts, needed {needed} {BESIDE}: other nodes run them"
