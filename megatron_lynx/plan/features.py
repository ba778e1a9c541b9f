"""Checks of a plan's features: facts of the launch that exclude each other, and requests of a rule that a feature excludes.

overlapped      Megatron's combined schedule interleaves nodes of a forward and a backward, and waits for no exchange: there are
                no windows, and recomputation is on demand, where backward enters the node. A layer of experts has four nodes:

    attention, norm, router, shared experts │ dispatch │ rows sorted, experts, rows sorted back │ combine, residual
    └ recomputed, or a checkpoint                        └ recomputed

userbuffers     linears communicate inside their GEMMs, so there is no tensor-parallel window and no gather to share. One buffer
                serves all layers and all micro-batches: a linear that runs out of turn would overwrite the input of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from megatron_lynx.anatomy import EXPERTS, EXPERTS_WITH_SHARED, HALVES, MLP, SHARED_EXPERTS, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, WindowAddress, window_at
from megatron_lynx.kinds.latent.section import core_kept
from megatron_lynx.kinds.opaque.section import IN_NODES, OPAQUE
from megatron_lynx.plan.plan import Head, Plan, Stage
from megatron_lynx.plan.rule import Rule

STAGES = "stages."
PACE = f"{STAGES}offload.pace_bytes"
IN_GRAPH = "runs as a captured graph (model.captured)"
BESIDE = "beside overlapped exchanges of experts (model.moe_overlapped)"
WITH_UB = "with parallel.userbuffers (--tp-comm-overlap)"


def of_launch(plan: Plan) -> Iterator[str]:
    for facts in (_unmet, _without_flushes, _fallen_back, _layers, _overlapped):
        yield from facts(plan)


def _needed(plan: Plan) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield every feature of the launch, in words, with the facts that it needs."""
    if plan.schedule == "double_buffered":
        stages = {"stages.whole": None, PACE: None}
        yield "with schedule double_buffered", {"parallel.chunks": 1, "model.moe_layers": (), **stages}
    if plan.parallel.userbuffers:
        model = {"model.adapted": (), "model.latent_attention": None, "model.implementation": "transformer_engine"}
        yield WITH_UB, {**model, "parallel.sequence_parallel": True}
    if plan.model.moe_overlapped:
        yield BESIDE, {"parallel.expert": 1, "schedule": "flush", "head": None}
        yield BESIDE, {"stages.weight_gradients": None, "stages.whole": None}
        yield BESIDE, {PACE: None} if plan.parallel.pipeline > 1 else {}  # most micro-batches wait for their backward then
    if plan.model.captured:
        beside = "beside captured graphs (model.captured)"
        yield beside, {"model.moe_overlapped": False, "schedule": "flush", "model.mtp": 0, "parallel.userbuffers": False}


def _unmet(plan: Plan) -> Iterator[str]:
    for beside, key, needed in ((beside, *fact) for beside, facts in _needed(plan) for fact in facts.items()):
        holders: list[tuple[str, Any]] = [(key, plan)]
        if key.startswith(STAGES):
            key = key.removeprefix(STAGES)
            holders = [(f"{plan.place_of(entry)}.{key}", entry) for entry in plan.stages]
        for place, holder in holders:
            found = reduce(lambda part, name: getattr(part, name, None), key.split("."), holder)
            if found != needed:
                yield f"{place} is {_said(found, needed)}, needed {_said(needed, needed)} {beside}: nothing else was tried"


def _said(value: object, needed: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    if isinstance(value, Head):
        return f"in {value.pieces} pieces"
    return "none" if value is None else "given" if needed is None else str(value)


def of_rule(plan: Plan, rule: Rule) -> Iterator[str]:
    if plan.parallel.userbuffers:
        yield from _without_collectives(plan, rule, WITH_UB)
    if adapted := plan.model.adapted:
        yield from _without_collectives(plan, rule, f"beside adapters (model.adapted: {', '.join(adapted)})")
    if plan.model.moe_overlapped:
        yield from _overlapped_rule(plan, rule)
    if plan.model.captured:
        yield from _captured_rule(plan, rule)


def places(rule: Rule, half: Half) -> list[tuple[str, str]]:
    windows = [("windows", stretch.window) for stretch in rule.windows.stretches(half)]
    gathers = [("gather", name)] if (name := rule.gather.of(half)) else []
    return list(dict.fromkeys(windows + gathers))


def spans(layers: list[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"


def ranges(numbers: list[int]) -> str:
    """Ascending numbers in words: `0, 2-5`."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True))


def _captured_rule(plan: Plan, rule: Rule) -> Iterator[str]:
    for section in dict.fromkeys(section for layer in rule.layers for section in plan.model.sections_of(layer)):
        if section.captured or section.apart:
            yield from _captured_half(rule, section)
    if (rule.checkpoint is not None and not isinstance(rule.checkpoint, str)) or rule.checkpoint == "layer":
        yield f"{rule.checkpoint_said}, needed one half or none: a part of the layer {IN_GRAPH}"


def _captured_half(rule: Rule, section: Section) -> Iterator[str]:
    deferred = [linear for linear in section.linears if linear in rule.weight_gradients]
    if section.captured:
        if asked := [*rule.recomputed_in(section.half), *deferred]:
            yield f"found {', '.join(asked)} recomputed or deferred, needed the {section.half} half kept whole: it {IN_GRAPH}"
        if rule.checkpoint == section.half:
            yield f"{rule.checkpoint_said}, needed the other half or none: it {IN_GRAPH}"
    else:
        if asked := [*(item for item in section.apart if item in rule.recompute), *deferred]:
            needed = f"none but {', '.join(section.recomputable)} recomputed, and none deferred"
            yield f"found {', '.join(asked)} recomputed or deferred, needed {needed}: the router {IN_GRAPH}"
        if rule.checkpoint == MLP.half:
            yield f"{rule.checkpoint_said}, needed attention or none: the router {IN_GRAPH}"


def _without_flushes(plan: Plan) -> Iterator[str]:
    layout, microbatches = plan.parallel, plan.batch.microbatches
    if plan.schedule == "flush":
        if not plan.defer_updates:
            yield "defer_updates is false, but schedule flush has nothing to defer"
    elif layout.pipeline == 1:
        yield "schedule is double_buffered, but pipeline is 1: it needs at least 2 stages"
    elif microbatches < layout.pipeline:
        needed = f"it needs at least pipeline ({layout.pipeline})"
        yield f"schedule is double_buffered, but batch.microbatches is {microbatches}: {needed}"


def _fallen_back(plan: Plan) -> Iterator[str]:
    for at, stage in enumerate(plan.stages):
        if stage.experts_hold is not None and (needed := _needed_to_fall_back(plan, stage)):
            yield f"stages.{at}.experts_hold is {stage.experts_hold:g}, needed {needed}: or leave it out"


def _needed_to_fall_back(plan: Plan, stage: Stage) -> str:
    if plan.parallel.expert == 1 and plan.model.moe_dispatcher == "alltoall" and not plan.model.moe_overlapped:
        # other plans name one rank, however many there are
        return "experts that are shared out over ranks (parallel.expert): one rank's load never changes"
    if stage.offload is not None and stage.offload.experts:
        return "offload.experts false: what goes to the host was sent before a load is known"
    return ""


def may_fall_back(plan: Plan, stage: Stage) -> bool:
    """Whether any half of experts of a stage can free activations. Older plans have `experts_hold` in other stages, too."""

    def frees_more(layer: int) -> bool:
        rule, section = stage.rule_for(layer), plan.model.sections_of(layer)[-1]
        return not rule.checkpoints(section.half) and not section.on_rows <= {*rule.recomputed(section)}

    return not _needed_to_fall_back(plan, stage) and any(map(frees_more, stage.layers))


def experts_rule(plan: Plan, rule: Rule) -> Iterator[str]:
    affected = [layer for layer in rule.layers if plan.model.has_experts(layer)]
    other_layers = [layer for layer in rule.layers if layer not in affected]
    dense = [item for item in MLP.names if item in rule.recompute and item not in EXPERTS.names]
    if affected and dense:
        finding = f"{', '.join(dense)} recomputed in {spans(affected)}, whose MLP is a mixture of experts (model.moe_layers)"
        yield f"found {finding}, needed items of {', '.join(EXPERTS.recomputable)}: give these layers a rule of their own"
    named = [item for item in EXPERTS_WITH_SHARED.names if item in (*rule.keep, *rule.recompute) and item not in MLP.names]
    if other_layers and named:
        finding = f"{', '.join(named)} in {spans(other_layers)}, whose MLP is no mixture of experts (model.moe_layers)"
        yield f"found {finding}, needed {', '.join(MLP.names)}: give these layers a rule of their own"
    shared = [item for item in named if item in SHARED_EXPERTS]
    if affected and shared and not plan.model.shared_experts:
        yield f"found {', '.join(shared)} in a model without shared experts, needed none of them, or model.shared_experts: true"
    stretched = rule.windows.stretches(MLP.half)[1:]
    if affected and stretched and rule.filling(MLP.half) is MLP:
        finding = f"windows.{MLP.half} of {spans(affected)} in several stretches"
        yield f"found {finding}, needed one window: a recomputation of experts runs at once"
    for name in dict.fromkeys(name for half in HALVES for _, name in places(rule, half)):
        windows = {layer: window for layer in rule.layers if isinstance(window := window_at(name, layer), WindowAddress)}
        inside = [layer for layer, at in windows.items() if at.half == EXPERTS.half and plan.model.has_experts(at.layer)]
        if inside and not plan.exchanging:
            finding = f"{name} of {spans(inside)}, which lies in a mixture of experts (model.moe_layers)"
            yield f"found {finding}, needed on_demand or a wait outside experts: give these layers a rule of their own"


def latent_rule(plan: Plan, rule: Rule) -> Iterator[str]:
    half, section = HALVES[0], plan.model.halves[HALVES[0]]
    if rule.checkpoints(half) and core_kept(section, plan.model.latent_attention, plan.model.fp8):
        yield f"{rule.checkpoint_said}, needed mlp or none: sparse attention that shares keys, or in FP8, never runs again"
    if rule.checkpoints(half) or rule.filling(half).in_some_layers:  # checked by `opaque_rule`
        return
    names = rule.filling(half).names
    if names != section.names:
        needed = f"{', '.join(section.names)}, as model.latent_attention says"
        yield f"found items {', '.join(names)} of the {half} half, needed {needed}"
        return
    if torn := section.torn(rule.recompute):
        linear, code = section.in_place
        why = f"the fused rotary kernel overwrites what {linear} returned, and what runs again behind it would do so twice"
        yield f"{', '.join(torn)} is kept, needed recomputed, or all of {linear}, {code} and what comes behind kept: {why}"
    if plan.parallel.sequence_parallel:
        for linear in section.gathering_rows:
            if linear in rule.recompute:
                yield f"{linear} is recomputed, but gathers the residual stream under sequence_parallel: keep it"
    if plan.model.implementation == "transformer_engine":
        for item in section.norms_apart(rule.recompute):
            inside = "Transformer Engine makes the norm inside the linear"
            yield f"{item.name} is recomputed, and {item.norm_inside} with it: {inside}"


def _layers(plan: Plan) -> Iterator[str]:
    """Layers of experts, and those with an opaque half."""
    opaque = {f"model.opaque_layers.{name}": (name, spans) for name, spans in plan.model.opaque_layers.items()}
    for key, (name, spans) in {"model.moe_layers": (None, plan.model.moe_layers), **opaque}.items():
        for span in spans:
            if span.last > plan.model.layers:
                yield f"{key} has {span}, but the model has layers 1-{plan.model.layers}"
            elif name is not None:
                half = OPAQUE[name].half
                for layer, filled in ((layer, _section(plan, layer, half).name) for layer in span):
                    if filled != name:
                        yield f"{key} has layer {layer}, where the {half} half is {filled} already"


def _section(plan: Plan, layer: int, half: Half) -> Section:
    return plan.model.sections_of(layer)[HALVES.index(half)]


def opaque_rule(plan: Plan, rule: Rule) -> Iterator[str]:
    for half in HALVES:
        sections = {section for layer in rule.layers for section in plan.model.sections_of(layer) if section.half == half}
        affected = {section.name for section in sections if section.opaque}
        named = ", ".join(sorted(affected))
        if affected and (rule.checkpoints(half) or (rule.checkpoint is not None and not isinstance(rule.checkpoint, str))):
            todo = "checkpoint the other half alone"
            yield f"found {rule.checkpoint_said}, needed {named} kept whole: it is opaque; {todo}"
        elif affected and rule.recomputed_in(half):
            usual = any(not section.opaque for section in sections)
            todo = "give these layers a rule of their own" if usual else "list it under keep"
            yield f"found {', '.join(rule.recomputed_in(half))} recomputed, needed {named} kept whole: it is opaque; {todo}"
        listed = [name for name in OPAQUE if name in (*rule.keep, *rule.recompute) and OPAQUE[name].half == half]
        if absent_names := [name for name in listed if name not in affected]:
            yield f"found {', '.join(absent_names)}, which no layer of the rule has (model.opaque_layers)"


def _overlapped(plan: Plan) -> Iterator[str]:
    if not plan.model.moe_overlapped:
        return
    if other := [name for name in plan.model.opaque_layers if name not in IN_NODES]:
        needed = f"none but {', '.join(IN_NODES)}"
        yield f"model.opaque_layers has {', '.join(other)}, needed {needed} {BESIDE}: no others were run in its nodes"
    for entry in plan.stages if plan.parallel.pipeline == 1 else ():
        if entry.offload is not None and entry.offload.half_by_half == "all":
            yield f"{plan.place_of(entry)}.offload.half_by_half is all, needed at_once {BESIDE}: there is none but these"


def _overlapped_rule(plan: Plan, rule: Rule) -> Iterator[str]:
    if ahead := sorted({name for half in HALVES for _, name in places(rule, half)} - {str(ON_DEMAND)}):
        yield f"found {', '.join(ahead)}, needed on_demand {BESIDE}: nothing waits for an exchange"
    section = next((plan.model.sections_of(layer)[1] for layer in rule.layers if plan.model.has_experts(layer)), None)
    if section is None:
        return
    if rule.checkpoints(MLP.half):
        yield f"{rule.checkpoint_said}, needed attention or none {BESIDE}: rows would travel again"
    if apart := [item for item in section.apart if item in rule.recompute]:
        needed = f"none but {', '.join(section.recomputable)}"
        yield f"found {', '.join(apart)} recomputed in layers of experts, needed {needed} {BESIDE}: other nodes run them"


def _without_collectives(plan: Plan, rule: Rule, beside: str) -> Iterator[str]:
    """Where no tensor-parallel collective is a window, and weight gradients are as in stock."""
    for linear in rule.weight_gradients:
        yield f"weight_gradients.{linear} is deferred, but {beside} none is: leave it out"
    if plan.parallel.tensor == 1:
        return
    if rule.ahead:
        yield f"{rule.ahead_said}, but {beside} no communication begins early: leave it out"
    for half in HALVES:
        if (gathered := rule.filling(half).gathered) in rule.recompute:
            yield f"{gathered} is recomputed, but {beside} it would communicate again (rule R2): keep it"
        for key, name in places(rule, half):
            if name not in (ON_DEMAND, RECV_BACKWARD):
                yield f"{key}.{half} is {name}, needed {ON_DEMAND} or {RECV_BACKWARD} {beside}"
