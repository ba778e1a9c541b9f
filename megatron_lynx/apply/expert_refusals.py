"""Refuses runs whose mixtures of experts cannot be looked into, where a plan replays items of them, sends them to the host, or
defers weight gradients of theirs.

A plan that keeps them whole, on the device, asks nothing of them but that they are Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.nn import Module

from megatron_lynx.anatomy import EXPERTS, Role, Section
from megatron_lynx.anatomy.experts import MIXTURE
from megatron_lynx.apply.live_run import TE_MODULE, LiveRun, module_at, name_of
from megatron_lynx.apply.site import places_of, sections_in
from megatron_lynx.errors import Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.stage import Stage

_MOE = "megatron.core.transformer.moe."
_KINDS = (f"{_MOE}experts.SequentialMLP", f"{_MOE}experts.TEGroupedMLP")
"""Kinds of experts whose linears are called where a replay can find them."""
_DISPATCHERS = (f"{_MOE}token_dispatcher.MoEAllGatherTokenDispatcher", f"{_MOE}token_dispatcher.MoEAlltoAllTokenDispatcher")
_LINEARS = "megatron.core.tensor_parallel.layers."
_LOCAL: Mapping[Role, tuple[str, ...]] = {
    "column_parallel": (f"{_LINEARS}ColumnParallelLinear",),
    "row_parallel": (f"{_LINEARS}RowParallelLinear",),
    "experts_in": (f"{_LINEARS}ColumnParallelLinear",),
    "experts_out": (f"{_LINEARS}RowParallelLinear",),
}
_TE: Mapping[Role, tuple[str, ...]] = {
    "column_parallel": (f"{TE_MODULE}TEColumnParallelLinear",),
    "row_parallel": (f"{TE_MODULE}TERowParallelLinear",),
    "experts_in": (f"{TE_MODULE}TEColumnParallelLinear", f"{TE_MODULE}TEColumnParallelGroupedLinear"),
    "experts_out": (f"{TE_MODULE}TERowParallelLinear", f"{TE_MODULE}TERowParallelGroupedLinear"),
}
"""By role the classes of linears that were shown to be replayed in every bit."""

OFF = {
    "moe_shared_expert_overlap": "--moe-shared-expert-overlap: shared experts then run inside the dispatcher's methods",
    "moe_latent_size": "--moe-latent-size: its projections are no items",
    "overlap_dispatch_backward_with_experts_wgrad": "--overlap-dispatch-backward-with-experts-wgrad: experts then run twice",
}
"""Config fields that must be off, and what to drop."""

TODO = "or keep the experts' items in the plan, on the device"


def refused_experts(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """Every reason why the experts of this run cannot be looked into; none where the plan does not ask for it."""
    touched = [layer for entry in plan.chunks_of(run.stage) for layer in _touched(plan, entry) if layer in run.expert_layers]
    if not touched:
        return
    for name, drop in OFF.items():
        if value := getattr(run.config, name, None):
            needed = "off where a plan replays, offloads or defers inside experts"
            yield Problem(f"config.{name}", str(value), needed, f"drop {drop}; {TODO}")
    layer = run.layers[touched[0]]  # all are built from one config
    yield from _other_kinds(touched[0], layer)
    try:
        section = next(section for section in sections_in(layer) if section.half == EXPERTS.half)
        yield from _other_linears(run, touched[0], layer, section)
    except AttributeError as missing:
        yield Problem(f"layer {touched[0]}", str(missing), "the sites of a mixture of experts", TODO)


def _touched(plan: Plan, entry: Stage) -> Iterator[int]:
    """The layers whose experts a stage's rules replay, send to the host, or defer weight gradients of."""
    offloads = entry.offload is not None and entry.offload.experts
    for layer in entry.layers:
        rule, section = entry.rule_for(layer), plan.model.sections_of(layer)[-1]
        defers = not rule.weight_gradients.keys().isdisjoint(section.linears)
        if section.has_experts and (offloads or defers or rule.replays(section.half)):
            yield layer


def _other_kinds(number: int, layer: Module) -> Iterator[Problem]:
    for part, known in (("experts", _KINDS), ("token_dispatcher", _DISPATCHERS)):
        found = name_of(module_at(layer, f"{MIXTURE}.{part}"))
        if found not in known:
            yield Problem(f"layer {number}.{MIXTURE}.{part}", found, " or ".join(known), TODO)


def _other_linears(run: LiveRun, number: int, layer: Module, section: Section) -> Iterator[Problem]:
    classes = _TE if run.uses_te else _LOCAL
    for place in places_of(section, layer, te=run.uses_te):
        known = classes.get(place.item.role)
        if known is not None and name_of(place.owner) not in known:
            yield Problem(f"layer {number}.{place.item.name}", name_of(place.owner), " or ".join(known), TODO)
            return  # one stands for all
