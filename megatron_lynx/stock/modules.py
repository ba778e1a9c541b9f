"""Megatron's `--recompute-modules` and `--offload-modules` as data.

Recomputed:

    checkpoint         the module keeps only its arguments; its inside is recomputed at the beginning of its backward
    output discarded   (`CheckpointWithoutOutput`) its output is freed as well, although the next module reads it in backward; it
                       is recomputed when the gradient of that module's output is ready

Source: `transformer_config.py`, `transformer_layer.py`, `attention.py` and `moe/` of megatron-core 0.16.1 to 0.19.2.

Offloaded after the module's forward:

    attn_norm  mlp_norm          norms that are separate modules (dense layers of Transformer Engine have none)
    qkv_linear                   its input; with Transformer Engine, which fuses the norm, also the layer's input
    core_attn                    queries, keys, values, and the kernel's saved tensors
    attn_proj                    the attention output; only together with core_attn, whose backward reads it, too
    expert_fc1  moe_act          inputs of the experts' GEMMs, and of their activation
    fused_group_mlp              both, if one kernel runs the experts

A dense layer's MLP offloads nothing. Tensors below 1 Mi elements (`min_offloaded_tensor_size`) and parameters stay. Source:
`fine_grained_activation_offload.py` of megatron-core 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.anatomy import ATTENTION, EXPERTS, EXPERTS_WITH_SHARED, LATENT, MLP, SHARED_EXPERTS, Role, Section
from megatron_lynx.kinds.delta.section import DELTA_NET, GATED_NORM
from megatron_lynx.kinds.experts.section import EXPERTS_ACTIVATION, EXPERTS_FC1

Fact = Literal["experts", "grouped_gemm", "shared_experts", "latent", "gated_delta"]
"""A fact of the model that a module needs to be legal or to have an effect."""


@dataclass(frozen=True)
class Module:
    name: str
    sections: tuple[Section, ...] = ()
    """Sections of whose halves it selects the items with one of `roles`."""
    roles: tuple[Role, ...] = ()
    discards_output: bool = False
    named: tuple[str, ...] = ()
    """Selected items in halves that only some layers have: experts and gated delta nets."""
    needs: Fact | None = None
    """Megatron refuses the module without it."""
    since: str = "0.15"

    def items(self, section: Section) -> frozenset[str]:
        """Items of a section that it recomputes, or whose saved tensors it offloads. A module of latent attention does not change
        other attention."""
        if section.in_some_layers:
            return frozenset(section.names).intersection(self.named)
        if section.half not in {module_section.half for module_section in self.sections} or (
            self.needs == "latent" and section.column_parallel
        ):
            return frozenset()
        return frozenset(item.name for item in section.items if item.role in self.roles)


RECOMPUTED = (
    Module("core_attn", (ATTENTION,), ("core", "sparse_core")),
    Module("layernorm", (ATTENTION, MLP), ("norm",), discards_output=True, named=(EXPERTS.norm, DELTA_NET.norm)),
    Module("mlp", (MLP,), ("column_parallel", "code", "row_parallel")),
    Module("moe", named=EXPERTS_WITH_SHARED.names[1:-1]),
    Module("moe_act", discards_output=True, named=(EXPERTS_ACTIVATION,), needs="grouped_gemm"),
    Module("shared_experts", named=SHARED_EXPERTS),
    Module(
        "mla_up_proj",
        (LATENT[True, True, False],),
        ("up_projection", "query_projection", "code"),
        discards_output=True,
        needs="latent",
    ),
    Module("gdn_norm_out", discards_output=True, named=(GATED_NORM,), needs="gated_delta", since="0.19"),
)
OFFLOADED = (
    Module("attn_norm", (ATTENTION,), ("norm",), since="0.16"),
    Module("qkv_linear", (ATTENTION,), ("column_parallel",), since="0.16"),
    Module("core_attn", (ATTENTION,), ("core",), since="0.16"),
    Module("attn_proj", (ATTENTION,), ("row_parallel",), since="0.16"),
    Module("mlp_norm", (MLP,), ("norm",), named=(EXPERTS.norm,), since="0.16"),
    Module("expert_fc1", named=(EXPERTS_FC1,), since="0.16"),
    Module("moe_act", named=(EXPERTS_ACTIVATION,), since="0.16"),
    Module("fused_group_mlp", since="0.19"),
)
OF_RECOMPUTE = {module.name: module for module in RECOMPUTED}
OF_OFFLOAD = {module.name: module for module in OFFLOADED}

LEAST_ELEMENTS = 1024 * 1024
"""Megatron's default of `min_offloaded_tensor_size`."""
