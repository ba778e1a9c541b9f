"""Where the sites of a live layer are: the submodules that Megatron built for the items of `megatron_lynx.anatomy`.

    _forward_attention   input_layernorm ─> self_attention.linear_qkv ─(rotary)─> .core_attention ─> .linear_proj ─(bda)─>
    _forward_mlp         pre_mlp_layernorm ─> mlp.linear_fc1 ─(activation)─> .linear_fc2 ─(bda)─>

The names have been stable from megatron-core 0.12 to 0.20. An opaque section, a mixture of experts, has no sites.
"""

from __future__ import annotations

from operator import attrgetter

from torch.nn import Module

from megatron_lynx.anatomy import Item, Section, sections_of
from megatron_lynx.apply.live_run import has_experts


def sited_sections_of(layer: Module) -> tuple[Section, ...]:
    """The sections of a layer that have sites."""
    return tuple(section for section in sections_of(experts=has_experts(layer)) if not section.opaque)


def modules_of(section: Section, layer: Module, *, te: bool = False) -> dict[Item, Module]:
    """The submodules of a layer by item. `te`: the layer is Transformer Engine's, which has norms inside its linears.

    Raises `AttributeError` where the layer has none of that name.
    """
    return {item: attrgetter(item.path)(layer) for item in section.sites if not te or item.role != "norm"}
