"""Halves of live layers that nobody looks into: which they are, by what their layers have there. They get no hook at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from megatron_lynx.apply.live_run import module_at
from megatron_lynx.kinds.held import Running
from megatron_lynx.kinds.opaque.section import OPAQUE, OpaqueName
from megatron_lynx.kinds.section import Section


def _class_in(layer: Any, path: str) -> str:
    """The name of the class of what a layer has at a place; empty where it has nothing there."""
    found = module_at(layer, path)
    return "" if found is None else type(found).__name__


def _lacks(layer: Any, place: str, *sites: str) -> bool:
    """Whether a layer has something at a place, and none of these sites in it."""
    return module_at(layer, place) is not None and all(module_at(layer, f"{place}.{site}") is None for site in sites)


ATTENTION, MLP, NOTHING = "self_attention", "mlp", ("", "IdentityOp", "IdentityFuncOp")
IS: dict[OpaqueName, Callable[[Any], bool]] = {
    "own_attention": lambda layer: _lacks(layer, ATTENTION, "linear_qkv", "linear_kv_up_proj"),
    "gated_attention": lambda layer: (
        bool(getattr(layer.config, "attention_output_gate", False)) and not _lacks(layer, ATTENTION, "linear_qkv")
    ),
    "gated_delta_net": lambda layer: _class_in(layer, ATTENTION) == "GatedDeltaNet",
    "mamba": lambda layer: _class_in(layer, "mixer") != "",
    "no_attention": lambda layer: _class_in(layer, ATTENTION) in NOTHING and _class_in(layer, "mixer") == "",
    "own_mlp": lambda layer: _lacks(layer, MLP, "linear_fc1", "router"),
    "no_mlp": lambda layer: _class_in(layer, MLP) in NOTHING,
}
"""What tells each of a live layer, from the most general to the most special of each half."""


class HeldOpaque(Running):
    """One such half."""

    stated_as = "model.opaque_layers"

    def __init__(self, name: OpaqueName) -> None:
        section = OPAQUE[name]
        self.name, self.half, self._section, self._is = name, section.half, section, IS[name]

    def section_in(self, layer: Module) -> Section | None:
        return self._section if self._is(layer) else None


HELD_OPAQUE = [HeldOpaque(name) for name in IS]
