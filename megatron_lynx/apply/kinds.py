"""Running side of the kinds of sections: which live layers have one, allowed classes, refusals, hooks.

A plan that keeps experts whole, on the device, only needs them to be Megatron's. If it recomputes or offloads their items, or
delays their weight gradients, experts with an unknown interior are refused. Opaque halves have no hooks.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks import collectives, halves
from megatron_lynx.apply.hooks.sites import places_of
from megatron_lynx.apply.live_run import LiveRun, captured_modules, module_at, name_of, overlapped
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.captured import ROUTER, in_graph
from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.experts.section import DISPATCHERS, EXPERTS, IN_NODES, MIXTURE, MIXTURES
from megatron_lynx.kinds.latent.section import KV_DOWN, LATENT, Q_DOWN, SPARSE
from megatron_lynx.kinds.mamba.section import DELTA_NET, MAMBA
from megatron_lynx.kinds.opaque.section import OPAQUE, OpaqueName
from megatron_lynx.kinds.section import HALVES, Half, Role, Section
from megatron_lynx.limits import OR_ELSE, refused
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.runtime.engine import Engine

Classes = Mapping[Role, Sequence[str]]
"""Full names of the classes that a site may have, by role; roles that are left out may have any."""

Layers = Mapping[int, Module]


class Running(ABC):
    half: Half
    name: str
    stated_as: str = "model.kinds"
    """The key of a plan that lists the layers of this kind; empty: no key does."""
    recorded: str = ""
    """The table of a release with the functions of this kind alone; empty if there is none."""

    @abstractmethod
    def section_in(self, layer: Module) -> Section | None:
        """The section of a live layer's half, or None if it is of another kind."""

    def refusals(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        yield from ()

    def claims(self, engine: Engine, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Claim]:
        yield from ()


CLASSES: dict[str, dict[str, Classes]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By section, for Megatron's own layers and Transformer Engine's: classes that were shown to be recomputed bit for bit."""


class HeldHalf(Running):
    """The usual content of a half, which every layer has, or an opaque one that is recognised."""

    def __init__(self, section: Section, recognised: Callable[[Any], bool] | None = None, recorded: str = "") -> None:
        self.name, self.half, self._section, self._recognised = section.name, section.half, section, recognised
        self.recorded = recorded
        self.stated_as = "model.opaque_layers" if recognised else ""

    def section_in(self, layer: Module) -> Section | None:
        return self._section if self._recognised is None or self._recognised(layer) else None


class HeldLatentAttention(Running):
    half, name = ATTENTION.half, LATENT[True, False].name
    stated_as = ""
    recorded = "latent"
    module, attention = "megatron.core.transformer.multi_latent_attention", "MLASelfAttention"
    """The one with fused down-projections is another class."""

    def section_in(self, layer: Module) -> Section | None:
        if name_of(module_at(layer, KV_DOWN.path.rpartition(".")[0])) != f"{self.module}.{self.attention}":
            return None
        config: Any = layer.config
        return self.section_of(module_at(layer, Q_DOWN.path) is not None, bool(config.apply_rope_fusion))

    def section_of(self, compressed: bool, fused_rotary: bool) -> Section:
        return LATENT[compressed, fused_rotary]

    def claims(self, engine: Engine, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Claim]:
        if run.tensor > 1 and layers:
            yield collectives.latent_claim(engine, self.module)


class HeldSparseAttention(HeldLatentAttention):
    name = SPARSE[True].name
    recorded = "sparse"
    module = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
    attention = "AbsorbedMLASelfAttention"

    def section_of(self, compressed: bool, fused_rotary: bool) -> Section:
        return SPARSE[compressed]

    def claims(self, engine: Engine, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Claim]:
        yield from super().claims(engine, plan, run, layers)
        if layers:
            yield halves.indexer_claim(engine)


_MOE = "megatron.core.transformer.moe."
LAYER_CLASS = f"{_MOE}moe_layer.MoELayer"
_KINDS = (f"{_MOE}experts.SequentialMLP", f"{_MOE}experts.TEGroupedMLP")
_DISPATCHERS = tuple(f"{_MOE}token_dispatcher.MoE{kind}TokenDispatcher" for kind in ("AllGather", "AlltoAll", "Flex"))
TODO = OR_ELSE["inside experts"]


class HeldExperts(Running):
    half, name, stated_as = EXPERTS.half, EXPERTS.name, "model.moe_layers"
    recorded = "experts"

    def section_in(self, layer: Module) -> Section | None:
        mixture = module_at(layer, MIXTURE)
        if name_of(mixture) != LAYER_CLASS:
            return None
        config: Any = layer.config
        mixtures = IN_NODES if overlapped(config) or ROUTER in captured_modules(config) else MIXTURES
        named = dispatched_by(config)
        dispatcher = next((known for known in DISPATCHERS if known == named), DISPATCHERS[0])  # unknown ones: as all-to-all
        return mixtures[dispatcher, getattr(mixture, "shared_experts", None) is not None]

    def refusals(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        touched = [layer for entry in plan.chunks_of(run.stage) for layer in _touched(plan, entry) if layer in layers]
        if not touched:
            return
        yield from refused(run.config, ["inside experts"])
        config: Any = run.config
        if overlapped(config) and run.fp8 and config.num_moe_experts == run.expert:
            needed = "several on each rank under FP8 with overlapped exchanges: Megatron frees a single one's rows"
            yield Problem("config.num_moe_experts", f"{config.num_moe_experts} over {run.expert} ranks", needed, TODO)
        rules = (entry.rule_for(layer) for entry in plan.chunks_of(run.stage) for layer in touched if layer in entry.layers)
        parts = getattr(config, "expert_tensor_parallel_size", None) or 1
        if parts > 1 and any(rule.rest_in_wait for rule in rules):  # cut experts exchange rows after the dispatch, in no window
            needed = "1 where the rest of a checkpointed half of experts runs again in a wait"
            yield Problem("config.expert_tensor_parallel_size", str(parts), needed, "leave windows.mlp of these layers out")
        layer = layers[touched[0]]  # all are built from one config
        for part, known in (("experts", _KINDS), ("token_dispatcher", _DISPATCHERS)):
            if (class_name := name_of(module_at(layer, f"{MIXTURE}.{part}"))) not in known:
                yield Problem(f"layer {touched[0]}.{MIXTURE}.{part}", class_name, " or ".join(known), TODO)
        try:
            yield from self._other_linears(run, touched[0], layer)
        except AttributeError as missing:
            yield Problem(f"layer {touched[0]}", str(missing), "the sites of a mixture of experts", TODO)

    def _other_linears(self, run: LiveRun, number: int, layer: Module) -> Iterator[Problem]:
        classes, (_, section) = classes_of(EXPERTS, te=run.uses_te), sections_in(layer)
        for place in places_of(section, layer, te=run.uses_te):
            known = classes.get(place.item.role)
            if known is not None and name_of(place.owner) not in known:
                yield Problem(f"layer {number}.{place.item.name}", name_of(place.owner), " or ".join(known), TODO)
                return  # the first stands for all

    def claims(self, engine: Engine, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Claim]:
        if layers:
            yield from halves.load_claims(engine, plan, run, layers)
        if plan.exchanging and plan.model.moe_dispatcher == "deepep":
            yield from collectives.deepep_claims(engine)
        elif plan.exchanging:
            yield collectives.exchange_claim(engine, run.expert_group)


def dispatched_by(config: Any) -> str:
    """The launch's name: Megatron's dispatcher, or the backend of its flex dispatcher."""
    dispatcher = str(config.moe_token_dispatcher_type)
    return str(getattr(config, "moe_flex_dispatcher_backend", "deepep")) if dispatcher == "flex" else dispatcher


def _touched(plan: Plan, entry: Stage) -> Iterator[int]:
    """Layers whose experts a stage recomputes, offloads, delays weight gradients of, or lets fall back."""
    offloads = entry.offload is not None and entry.offload.experts
    for layer in entry.layers:
        rule, section = entry.rule_for(layer), plan.model.sections_of(layer)[-1]
        defers = not rule.weight_gradients.keys().isdisjoint(section.linears)
        falls_back = entry.experts_hold is not None
        if (section.name == EXPERTS.name) and (offloads or defers or falls_back or rule.recomputed(section)):
            yield layer


def _class_in(layer: Any, path: str) -> str:
    module = module_at(layer, path)
    return "" if module is None else type(module).__name__


def _lacks(layer: Any, place: str, *sites: str) -> bool:
    return module_at(layer, place) is not None and all(module_at(layer, f"{place}.{site}") is None for site in sites)


IN_ATTENTION, IN_MLP, NOTHING = "self_attention", "mlp", ("", "IdentityOp", "IdentityFuncOp")
IS: dict[OpaqueName, Callable[[Any], bool]] = {
    "own_attention": lambda layer: _lacks(layer, IN_ATTENTION, "linear_qkv", "linear_kv_up_proj"),
    "gated_attention": lambda layer: (
        bool(getattr(layer.config, "attention_output_gate", False)) and not _lacks(layer, IN_ATTENTION, "linear_qkv")
    ),
    "no_attention": lambda layer: _class_in(layer, IN_ATTENTION) in NOTHING and _class_in(layer, "mixer") == "",
    "own_mlp": lambda layer: _lacks(layer, IN_MLP, "linear_fc1", "router"),
    "no_mlp": lambda layer: _class_in(layer, IN_MLP) in NOTHING,
}
"""Recognises the opaque halves of a live layer, from the most general to the most special of each half."""


FACES: list[Running] = [HeldHalf(ATTENTION), HeldHalf(MLP), HeldLatentAttention(), HeldSparseAttention(), HeldExperts()]
FACES += [HeldHalf(OPAQUE[name], recognised) for name, recognised in IS.items()]
FACES += [
    HeldHalf(DELTA_NET, lambda layer: _class_in(layer, IN_ATTENTION) == "GatedDeltaNet", "delta"),
    HeldHalf(MAMBA, lambda layer: _class_in(layer, "mixer") != "", "mamba"),
]
"""The usual content of each half first: it accepts every layer."""


def sections_in(layer: Module) -> tuple[Section, Section]:
    attention, mlp = (in_graph(_face_and_section(half, layer)[1], captured_modules(layer.config)) for half in HALVES)
    return attention, mlp


def classes_of(section: Section, *, te: bool) -> Classes:
    return CLASSES.get(section.name, CLASSES["dense"])["te" if te else "local"]


def layers_by_kind(run: LiveRun) -> list[tuple[Running, Layers]]:
    having: dict[Running, dict[int, Module]] = {face: {} for face in FACES}
    for number, layer in run.layers.items():
        for half in HALVES:
            having[_face_and_section(half, layer)[0]][number] = layer
    return list(having.items())


def _face_and_section(half: Half, layer: Module) -> tuple[Running, Section]:
    answers = ((face, face.section_in(layer)) for face in reversed(FACES) if face.half == half)
    return next((face, section) for face, section in answers if section is not None)
