"""Mixtures of experts of a run: where they are, the hooks that count rows and hold exchanges, and what is refused.

A plan that keeps them whole, on the device, asks nothing of them but that they are Megatron's. Where it replays items of them,
sends them to the host, or defers weight gradients of theirs, those that cannot be looked into are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.nn import Module

from megatron_lynx.apply.graphs import captured_modules
from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks import exchanges, expert_load, fused_exchanges
from megatron_lynx.apply.limits import in_config
from megatron_lynx.apply.live_run import LINEARS, OWNS_USERBUFFER, TE_MODULE, LiveRun, module_at, name_of, overlapped
from megatron_lynx.apply.site import places_of
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.captured import ROUTER
from megatron_lynx.kinds.experts.section import DISPATCHERS, EXPERTS, IN_NODES, MIXTURE, MIXTURES, Dispatcher
from megatron_lynx.kinds.held import Classes, Layers, Running
from megatron_lynx.kinds.section import Section
from megatron_lynx.limits import OR_ELSE, refused
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.stage import Stage
from megatron_lynx.runtime.engine import Engine

_MOE = "megatron.core.transformer.moe."
LAYER_CLASS = f"{_MOE}moe_layer.MoELayer"
"""The class of the mixture of experts that a layer may have in place of an MLP."""
_KINDS = (f"{_MOE}experts.SequentialMLP", f"{_MOE}experts.TEGroupedMLP")
"""Kinds of experts whose linears are called where a replay can find them."""
_DISPATCHERS = tuple(f"{_MOE}token_dispatcher.MoE{kind}TokenDispatcher" for kind in ("AllGather", "AlltoAll", "Flex"))
_LOCAL: Classes = {
    "column_parallel": (f"{LINEARS}ColumnParallelLinear",),
    "row_parallel": (f"{LINEARS}RowParallelLinear",),
    "experts_in": (f"{LINEARS}ColumnParallelLinear",),
    "experts_out": (f"{LINEARS}RowParallelLinear",),
}
_TE: Classes = {
    "column_parallel": (f"{TE_MODULE}TEColumnParallelLinear",),
    "row_parallel": (f"{TE_MODULE}TERowParallelLinear",),
    "experts_in": (f"{TE_MODULE}TEColumnParallelLinear", f"{TE_MODULE}TEColumnParallelGroupedLinear"),
    "experts_out": (f"{TE_MODULE}TERowParallelLinear", f"{TE_MODULE}TERowParallelGroupedLinear"),
}
"""By role the classes of linears that were shown to be replayed in every bit."""

TODO = OR_ELSE["inside experts"]


class HeldExperts(Running):
    """Megatron's `MoELayer`."""

    half, name = EXPERTS.half, EXPERTS.name
    recorded, recorded_as = "experts", "mixtures of experts do"
    local, te = _LOCAL, _TE

    def section_in(self, layer: Module) -> Section | None:
        mixture = module_at(layer, MIXTURE)
        if name_of(mixture) != LAYER_CLASS:
            return None
        config: Any = layer.config
        mixtures = IN_NODES if overlapped(config) or ROUTER in captured_modules(config) else MIXTURES
        return mixtures[_dispatcher(config), getattr(mixture, "shared_experts", None) is not None]

    def refusals(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        """Every reason why the experts of this run cannot be looked into; none where the plan does not ask for it."""
        touched = [layer for entry in plan.chunks_of(run.stage) for layer in _touched(plan, entry) if layer in layers]
        if not touched:
            return
        yield from refused(run.config, ["inside experts"], in_config)
        config: Any = run.config
        if overlapped(config) and run.fp8 and config.num_moe_experts == run.expert:
            needed = "several on each rank under FP8 with overlapped exchanges: Megatron frees a single one's rows"
            yield Problem("config.num_moe_experts", f"{config.num_moe_experts} over {run.expert} ranks", needed, TODO)
        yield from _cut(plan, run, touched)
        layer = layers[touched[0]]  # all are built from one config
        yield from _other_kinds(touched[0], layer)
        try:
            yield from self._other_linears(run, touched[0], layer)
        except AttributeError as missing:
            yield Problem(f"layer {touched[0]}", str(missing), "the sites of a mixture of experts", TODO)

    def _other_linears(self, run: LiveRun, number: int, layer: Module) -> Iterator[Problem]:
        classes, section = self.te if run.uses_te else self.local, self.section_in(layer)
        for place in places_of(section, layer, te=run.uses_te) if section is not None else ():
            known = classes.get(place.item.role)
            if known is not None and name_of(place.owner) not in known:
                yield Problem(f"layer {number}.{place.item.name}", name_of(place.owner), " or ".join(known), TODO)
                return  # one stands for all
            if flag := next(
                (name for name in OWNS_USERBUFFER if place.item.of_experts and getattr(place.owner, name, False)), None
            ):
                yield Problem(f"layer {number}.{place.item.name}.{flag}", "on", "off: what owns a userbuffer runs once", TODO)
                return

    def mismatches(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        """Layers that have a mixture of experts where the plan has an MLP, or the other way round."""
        planned = {number for number in run.layers if plan.model.has_experts(number)}
        for numbers, found, needed in (
            (layers.keys() - planned, "an MLP", EXPERTS.name),
            (planned - layers.keys(), EXPERTS.name, "an MLP"),
        ):
            if numbers:
                place = f"plan: model.moe_layers: layers {', '.join(map(str, sorted(numbers)))}"
                yield Problem(place, found, f"{needed}, as this run has it", "make a plan for this model")
        dispatcher = _dispatched_by(run.config)
        if layers and plan.exchanging and plan.model.moe_dispatcher != dispatcher:
            yield Problem(
                "plan: model.moe_dispatcher",
                plan.model.moe_dispatcher,
                f"{dispatcher}, which brings tokens to experts in this run",
                "make a plan for this launch",
            )
        elif layers and plan.parallel.expert not in (1, run.expert):
            place, needed = "plan: parallel.expert", f"{run.expert}, the ranks that exchange tokens, or 1"
            yield Problem(place, str(plan.parallel.expert), needed, "make a plan for this layout")
        if layers and plan.model.shared_experts and not run.config.moe_shared_expert_intermediate_size:
            place = "plan: model.shared_experts"
            yield Problem(place, "True", "False, as this run has none", "make a plan for this model")

    def claims(self, engine: Engine, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Claim]:
        if layers:
            yield from expert_load.claims(engine, layers.items(), _balanced_rows(plan, run))
        if plan.exchanging and plan.model.moe_dispatcher == "deepep":
            yield from fused_exchanges.claims(engine)
        elif plan.exchanging:
            yield from exchanges.claims(engine, run.expert_group)


def _balanced_rows(plan: Plan, run: LiveRun) -> int:
    """How many rows experts of each rank would get of one micro-batch if all were asked as often."""
    tokens = plan.model.seq // run.shards_of(plan.parallel.sequence_parallel) * plan.batch.micro
    return expert_load.balanced_rows(tokens, run.config.moe_router_topk)


def _dispatcher(config: Any) -> Dispatcher:
    """Who brings tokens to experts, as far as that decides what a plan may do. Others are taken for Megatron's all-to-all."""
    named = _dispatched_by(config)
    return next((known for known in DISPATCHERS if known == named), DISPATCHERS[0])


def _dispatched_by(config: Any) -> str:
    """As the launch names it: Megatron's dispatcher, or whose kernels its flex dispatcher uses."""
    dispatcher = str(config.moe_token_dispatcher_type)
    return str(getattr(config, "moe_flex_dispatcher_backend", "deepep")) if dispatcher == "flex" else dispatcher


def _touched(plan: Plan, entry: Stage) -> Iterator[int]:
    """The layers whose experts a stage's rules replay, send to the host, or defer weight gradients of; or that may fall back."""
    offloads = entry.offload is not None and entry.offload.experts
    for layer in entry.layers:
        rule, section = entry.rule_for(layer), plan.model.sections_of(layer)[-1]
        defers = not rule.weight_gradients.keys().isdisjoint(section.linears)
        falls_back = entry.experts_hold is not None
        if (section.name == EXPERTS.name) and (offloads or defers or falls_back or rule.recomputed(section)):
            yield layer


def _cut(plan: Plan, run: LiveRun, touched: list[int]) -> Iterator[Problem]:
    """Experts that are cut over ranks exchange rows behind the dispatch, which no window may."""
    rules = (entry.rule_for(layer) for entry in plan.chunks_of(run.stage) for layer in touched if layer in entry.layers)
    parts = getattr(run.config, "expert_tensor_parallel_size", None) or 1
    if parts > 1 and any(rule.goes_on for rule in rules):
        needed = "1 where the rest of a checkpointed half of experts runs again in a wait"
        yield Problem("config.expert_tensor_parallel_size", str(parts), needed, "leave windows.mlp of these layers out")


def _other_kinds(number: int, layer: Module) -> Iterator[Problem]:
    for part, known in (("experts", _KINDS), ("token_dispatcher", _DISPATCHERS)):
        found = name_of(module_at(layer, f"{MIXTURE}.{part}"))
        if found not in known:
            yield Problem(f"layer {number}.{MIXTURE}.{part}", found, " or ".join(known), TODO)
