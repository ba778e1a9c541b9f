"""Megatron's `--offload-modules`, as data: whose saved tensors go to host memory when the module's forward is over.

    attn_norm  mlp_norm          norms that are modules of their own (in dense layers of Transformer Engine they are none)
    qkv_linear                   its input; with Transformer Engine, whose norm is made inside, the layer's input as well
    core_attn                    queries, keys, values, and what the kernel keeps
    attn_proj                    what the attention made; only together with core_attn, whose backward reads it, too
    expert_fc1  moe_act          what the experts' GEMMs are given, and what their activation is given
    fused_group_mlp              both, where one kernel runs the experts

Of a dense layer's MLP nothing can be offloaded. What has fewer than 1 Mi elements stays (`min_offloaded_tensor_size`), and so do
parameters. Read in `fine_grained_activation_offload.py` of megatron-core 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.anatomy import ATTENTION, EXPERTS, MLP, Role, Section
from megatron_lynx.kinds.experts.section import EXPERTS_ACTIVATION, EXPERTS_FC1

LEAST_ELEMENTS = 1024 * 1024
"""Megatron's default of `min_offloaded_tensor_size`."""


@dataclass(frozen=True)
class OffloadModule:
    """One word of `--offload-modules`."""

    name: str
    section: Section
    role: Role | None = None
    """The item of the section whose saved tensors go. None: it is inside experts."""
    experts: str | None = None
    """The item of the half of a layer with experts whose saved tensors go."""
    since: str = "0.16"


OFFLOADED = (
    OffloadModule("attn_norm", ATTENTION, "norm"),
    OffloadModule("qkv_linear", ATTENTION, "column_parallel"),
    OffloadModule("core_attn", ATTENTION, "core"),
    OffloadModule("attn_proj", ATTENTION, "row_parallel"),
    OffloadModule("mlp_norm", MLP, "norm", experts=EXPERTS.norm),
    OffloadModule("expert_fc1", MLP, experts=EXPERTS_FC1),
    OffloadModule("moe_act", MLP, experts=EXPERTS_ACTIVATION),
    OffloadModule("fused_group_mlp", MLP, since="0.19"),
)


def offload_module(name: str) -> OffloadModule:
    """Raises `KeyError` for a word that no release knows."""
    return {module.name: module for module in OFFLOADED}[name]
