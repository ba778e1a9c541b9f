"""Kinds of sections in a run: which live layers have one, allowed classes, refusals, hooks.

A plan that keeps experts whole, on the device, only needs them to be Megatron's. If it recomputes or offloads their items, or
delays their weight gradients, experts with an unknown interior are refused. Opaque halves have no hooks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks import collectives, halves
from megatron_lynx.apply.hooks.sites import places_of
from megatron_lynx.apply.live_run import LiveRun, captured_modules, linear_in, module_at, name_of, overlapped
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.experts.section import DISPATCHERS, EXPERTS, MIXTURE
from megatron_lynx.kinds.latent.section import KV_DOWN, LATENT, SPARSE, LatentSizes
from megatron_lynx.kinds.opaque.section import OpaqueName
from megatron_lynx.kinds.section import Role, Section
from megatron_lynx.kinds.sections import Facts, LayerKind, sections_of
from megatron_lynx.limits import OR_ELSE, refused
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.runtime.engine import Engine

Classes = Mapping[Role, Sequence[str]]
"""Full names of the classes that a site may have, by role; roles that are left out may have any."""

CLASSES: dict[str, dict[str, Classes]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By section, for Megatron's own layers and Transformer Engine's: classes that were shown to be recomputed bit for bit."""


def other_classes(section: Section, number: int, layer: Module, todo: str, *, te: bool) -> Iterator[Problem]:
    """The sites of layer `number` whose classes are not known. Raises `AttributeError` if it lacks one."""
    of_role = CLASSES.get(section.name, CLASSES["dense"])["te" if te else "local"]
    for item, owner, _ in places_of(section, layer):
        known = of_role.get(item.role) if section.fuses_norm or item.role != "norm" else None
        if known is not None and name_of(linear_in(owner)) not in known:
            yield Problem(f"layer {number}.{item.name}", name_of(owner), " or ".join(known), todo)


def _class_in(layer: Any, path: str) -> str:
    module = module_at(layer, path)
    return "" if module is None else type(module).__name__


def _lacks(layer: Any, place: str, *sites: str) -> bool:
    return module_at(layer, place) is not None and all(module_at(layer, f"{place}.{site}") is None for site in sites)


IN_ATTENTION, IN_MLP, NOTHING = "self_attention", "mlp", ("", "IdentityOp", "IdentityFuncOp")
OPAQUE_IN: Mapping[OpaqueName, Callable[[Any], bool]] = {
    "mamba": lambda layer: _class_in(layer, "mixer") != "",
    "gated_delta_net": lambda layer: _class_in(layer, IN_ATTENTION) == "GatedDeltaNet",
    "no_attention": lambda layer: _class_in(layer, IN_ATTENTION) in NOTHING and _class_in(layer, "mixer") == "",
    "gated_attention": lambda layer: (
        bool(getattr(layer.config, "attention_output_gate", False)) and not _lacks(layer, IN_ATTENTION, "linear_qkv")
    ),
    "own_attention": lambda layer: _lacks(layer, IN_ATTENTION, "linear_qkv", "linear_kv_up_proj"),
    "no_mlp": lambda layer: _class_in(layer, IN_MLP) in NOTHING,
    "own_mlp": lambda layer: _lacks(layer, IN_MLP, "linear_fc1", "router"),
}
"""Recognises these halves of a live layer, from the most special to the most general of each half."""

KINDS_IN: dict[str, Callable[[Any], bool]] = {}
"""Recognises the kinds that a plan names in `model.kinds`, by name."""

_MLA = "megatron.core.transformer.multi_latent_attention"
_ABSORBED = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
_LATENT = {f"{_MLA}.MLASelfAttention": False, f"{_ABSORBED}.AbsorbedMLASelfAttention": True}
"""Classes of latent attention, and whether it is sparse. The one with fused down-projections is another class."""
_MOE = "megatron.core.transformer.moe."
LAYER_CLASS = f"{_MOE}moe_layer.MoELayer"
_KINDS = (f"{_MOE}experts.SequentialMLP", f"{_MOE}experts.TEGroupedMLP")
_DISPATCHERS = tuple(f"{_MOE}token_dispatcher.MoE{kind}TokenDispatcher" for kind in ("AllGather", "AlltoAll", "Flex"))


def facts_in(layer: Any) -> Facts:
    config, mixture = layer.config, module_at(layer, MIXTURE)
    sparse, named = _LATENT.get(name_of(module_at(layer, KV_DOWN.path.rpartition(".")[0]))), dispatched_by(config)
    return Facts(
        latent=None if sparse is None else LatentSizes.of(config, sparse=sparse),
        experts=name_of(mixture) == LAYER_CLASS,
        shared_experts=getattr(mixture, "shared_experts", None) is not None,
        dispatcher=next((known for known in DISPATCHERS if known == named), DISPATCHERS[0]),  # unknown ones: as all-to-all
        overlapped=overlapped(config),
        kinds=tuple(name for name, recognises in KINDS_IN.items() if recognises(layer)),
        opaque=tuple(name for name, recognises in OPAQUE_IN.items() if recognises(layer)),
        captured=captured_modules(config),
    )


def dispatched_by(config: Any) -> str:
    """The launch's name: Megatron's dispatcher, or the backend of its flex dispatcher."""
    dispatcher = str(config.moe_token_dispatcher_type)
    return str(getattr(config, "moe_flex_dispatcher_backend", "deepep")) if dispatcher == "flex" else dispatcher


def sections_in(layer: Any) -> LayerKind:
    return sections_of(facts_in(layer))


def layers_by_kind(run: LiveRun) -> Mapping[str, Mapping[int, Module]]:
    """The layers, by number, that have a half of a kind, by the name of its section."""
    having: dict[str, dict[int, Module]] = defaultdict(dict)
    for number, layer in run.layers.items():
        for section in sections_in(layer):
            having[section.name][number] = layer
    return having


def claims(engine: Engine, plan: Plan, run: LiveRun) -> Iterator[Claim]:
    """Hooks that only layers of some kinds need. Every rank of a pipeline has those on exchanges."""
    having = layers_by_kind(run)
    for section, module in ((LATENT[True, False], _MLA), (SPARSE[True], _ABSORBED)):
        if run.tensor > 1 and having[section.name]:
            yield collectives.latent_claim(engine, module)
    if having[SPARSE[True].name]:
        yield halves.indexer_claim(engine)
    if layers := having[EXPERTS.name]:
        yield from halves.load_claims(engine, plan, run, layers)
    if plan.exchanging and plan.model.moe_dispatcher == "deepep":
        yield from collectives.deepep_claims(engine)
    elif plan.exchanging:
        yield collectives.exchange_claim(engine, run.expert_group)


TODO = OR_ELSE["inside experts"]


def refused_experts(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    having, config, entries = layers_by_kind(run)[EXPERTS.name], run.config, plan.chunks_of(run.stage)
    touched = [layer for entry in entries for layer in _touched(plan, entry) if layer in having]
    if not touched:
        return
    yield from refused(config, ["inside experts"])
    if overlapped(config) and run.fp8 and config.num_moe_experts == run.expert:
        needed = "several on each rank under FP8 with overlapped exchanges: Megatron frees a single one's rows"
        yield Problem("config.num_moe_experts", f"{config.num_moe_experts} over {run.expert} ranks", needed, TODO)
    rules = (entry.rule_for(layer) for entry in entries for layer in touched if layer in entry.layers)
    parts = getattr(config, "expert_tensor_parallel_size", None) or 1
    if parts > 1 and any(rule.rest_in_wait for rule in rules):  # cut experts exchange rows after the dispatch, in no window
        needed = "1 where the rest of a checkpointed half of experts runs again in a wait"
        yield Problem("config.expert_tensor_parallel_size", str(parts), needed, "leave windows.mlp of these layers out")
    number, layer = touched[0], having[touched[0]]  # all are built from one config
    for part, known in (("experts", _KINDS), ("token_dispatcher", _DISPATCHERS)):
        if (class_name := name_of(module_at(layer, f"{MIXTURE}.{part}"))) not in known:
            yield Problem(f"layer {number}.{MIXTURE}.{part}", class_name, " or ".join(known), TODO)
    try:
        yield from islice(other_classes(sections_in(layer)[1], number, layer, TODO, te=run.uses_te), 1)  # it stands for all
    except AttributeError as missing:
        yield Problem(f"layer {number}", str(missing), "the sites of a mixture of experts", TODO)


def _touched(plan: Plan, entry: Stage) -> Iterator[int]:
    """Layers whose experts a stage recomputes, offloads, delays weight gradients of, or lets fall back."""
    offloads = entry.offload is not None and entry.offload.experts
    for layer in entry.layers:
        rule, section = entry.rule_for(layer), plan.model.sections_of(layer)[-1]
        defers = not rule.weight_gradients.keys().isdisjoint(section.linears)
        falls_back = entry.experts_hold is not None
        if (section.name == EXPERTS.name) and (offloads or defers or falls_back or rule.recomputed(section)):
            yield layer
