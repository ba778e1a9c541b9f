"""Where the sites of a layer are, and what lies between them, in Megatron's terms.

    _forward_attention   input_layernorm ─> self_attention.linear_qkv ─(rotary)─> .core_attention ─> .linear_proj ─(bda)─>
    _forward_mlp         pre_mlp_layernorm ─> mlp.linear_fc1 ─(activation)─> .linear_fc2 ─(bda)─>

The names have been stable from megatron-core 0.12 to 0.20. With Transformer Engine a norm is no submodule of the layer (an
identity is in its place): it is the first part of the linear behind it, and an item all the same.

In place of an MLP there may be a mixture of experts. Such a half is kept whole and not looked into: it has no sites.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from torch.nn import Module

from megatron_lynx.apply.live_run import has_experts
from megatron_lynx.items import Half


@dataclass(frozen=True)
class HalfLayout:
    """One half of a layer: the method that runs it, the attribute paths of its sites, and the items of the code between."""

    half: Half
    method: str
    paths: MappingProxyType[str, str]
    code_behind: MappingProxyType[str, str]
    norm: str
    row_parallel: str
    column_parallel: str

    def modules_of(self, layer: Module, *, te: bool = False) -> dict[str, Module]:
        """The sites of a layer. `te`: the layer is Transformer Engine's."""
        return {site: attrgetter(path)(layer) for site, path in self.paths.items() if not te or site != self.norm}


def layouts_of(layer: Module) -> tuple[HalfLayout, ...]:
    """The halves of a layer that have sites."""
    return tuple(layout for half, layout in LAYOUTS.items() if half == "attention" or not has_experts(layer))


LAYOUTS: dict[Half, HalfLayout] = {
    "attention": HalfLayout(
        half="attention",
        method="_forward_attention",
        paths=MappingProxyType(
            {
                "input_layernorm": "input_layernorm",
                "linear_qkv": "self_attention.linear_qkv",
                "core_attention": "self_attention.core_attention",
                "linear_proj": "self_attention.linear_proj",
            }
        ),
        code_behind=MappingProxyType({"linear_qkv": "rotary", "linear_proj": "attention_bda"}),
        norm="input_layernorm",
        row_parallel="linear_proj",
        column_parallel="linear_qkv",
    ),
    "mlp": HalfLayout(
        half="mlp",
        method="_forward_mlp",
        paths=MappingProxyType(
            {"pre_mlp_layernorm": "pre_mlp_layernorm", "linear_fc1": "mlp.linear_fc1", "linear_fc2": "mlp.linear_fc2"}
        ),
        code_behind=MappingProxyType({"linear_fc1": "activation", "linear_fc2": "mlp_bda"}),
        norm="pre_mlp_layernorm",
        row_parallel="linear_fc2",
        column_parallel="linear_fc1",
    ),
}
