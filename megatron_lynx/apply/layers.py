"""Which layers the hooks know: Megatron's transformer layer with its own sites, or with those of Transformer Engine; in place of
its MLP there may be another section in some layers, of which nothing is asked here (`apply.kinds`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import HALVES, Item
from megatron_lynx.apply.hybrid import CLASSES, owner_of
from megatron_lynx.apply.kinds import Classes, classes_of, sections_in
from megatron_lynx.apply.live_run import OWNS_USERBUFFER, LiveRun, name_of
from megatron_lynx.apply.site import modules_of
from megatron_lynx.errors import Problem

_LAYER_CLASS = "megatron.core.transformer.transformer_layer.TransformerLayer"
_TE_FLAGS = ("return_layernorm_output", "fsdp_group")
"""Attributes of its linears that must be off: they hand on or hold what no item names."""

_OTHER_KINDS = "layers of another kind, such as hybrid models have, are not planned yet"


def refused_layers(run: LiveRun) -> Iterator[Problem]:
    """Layers of another kind, and what makes a linear of Transformer Engine unfit."""
    first = next(iter(run.layers), None)
    for number, layer in run.layers.items():
        if others := [*_other_layers(number, layer)]:
            yield from others
            continue
        try:
            sections = [section for section in sections_in(layer) if not (section.in_some_layers or section.captured)]
            sites = {item: module for section in sections for item, module in modules_of(section, layer).items()}
        except AttributeError as missing:
            yield Problem(f"layer {number}", str(missing), "the sites of a layer", _OTHER_KINDS)
            continue
        for section in sections:
            held = {item: sites[item] for item in section.sites if section.fuses_norm or item.role != "norm"}
            yield from _other_classes(number, held, classes_of(section, te=run.uses_te))
        if run.uses_te and number == first:  # all are built from one config
            yield from _te_flags(number, sites, _TE_FLAGS if run.userbuffers else (*OWNS_USERBUFFER, *_TE_FLAGS))
    if run.userbuffers and run.layers and not run.uses_te:
        todo = "drop --tp-comm-overlap, or launch with --transformer-impl transformer_engine"
        yield Problem("config.tp_comm_overlap", "True", "off with Megatron's own layers, which have no userbuffers", todo)


def _other_layers(number: int, layer: Any) -> Iterator[Problem]:
    """A live layer, or each of the two of a hybrid stack that are one, of another class than Megatron's, if it is looked into."""
    of_half = dict.fromkeys(HALVES, (_LAYER_CLASS,)) if isinstance(layer, Module) else CLASSES
    known = [section.half for section in sections_in(layer) if not section.kept_whole]
    owners = {owner_of(layer, half): of_half[half] for half in known}
    for owner, needed in owners.items():
        if name_of(owner) not in needed:
            yield Problem(f"layer {number}", name_of(owner), " or ".join(needed), _OTHER_KINDS)


def _other_classes(number: int, sites: Mapping[Item, Module], classes: Classes) -> Iterator[Problem]:
    for site, module in sites.items():
        known = classes.get(site.role)
        if known is not None and name_of(module) not in known:
            needed = " or ".join(known)
            todo = "launch with --transformer-impl local, or with transformer_engine and its usual layers"
            yield Problem(f"layer {number}.{site.name}", name_of(module), needed, todo)


def _te_flags(number: int, sites: Mapping[Item, Module], flags: Sequence[str]) -> Iterator[Problem]:
    for site, module in sites.items():
        for flag in flags:
            if site.is_linear and getattr(module, flag, None):
                yield Problem(f"layer {number}.{site.name}.{flag}", str(getattr(module, flag)), "off under a plan")
