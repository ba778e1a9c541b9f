"""Megatron's words for modules, as data: `--recompute-modules`, what each runs again and what is let go for it;
`--offload-modules`, whose saved tensors go to host memory.

Recomputed:

    checkpoint         the module keeps its arguments alone; its inside is made again when its backward begins
    output discarded   (`CheckpointWithoutOutput`) its output is freed as well, although the next module reads it in backward; it
                       is made again when the gradient of what lies behind that module is there

Read in `transformer_config.py`, `transformer_layer.py`, `attention.py` and `moe/` of megatron-core 0.16.1 to 0.19.2.

Offloaded, when the module's forward is over:

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
from typing import Literal

from megatron_lynx.anatomy import ATTENTION, EXPERTS, EXPERTS_WITH_SHARED, LATENT, MLP, SHARED_EXPERTS, Role, Section
from megatron_lynx.kinds.experts.section import EXPERTS_ACTIVATION, EXPERTS_FC1

Fact = Literal["experts", "grouped_gemm", "shared_experts", "latent", "gated_delta"]
"""What a model must have for a module to do something, or to be legal at all."""


@dataclass(frozen=True)
class RecomputeModule:
    """One word of `--recompute-modules`."""

    name: str
    sections: tuple[Section, ...] = ()
    """The sections of which it runs a part again: those of these halves, as far as they have items of `roles`."""
    roles: tuple[Role, ...] = ()
    """Which items of these."""
    discards_output: bool = False
    experts: tuple[str, ...] = ()
    """What it runs again in the half of a layer with experts."""
    needs: Fact | None = None
    """Without it, Megatron refuses the word."""
    since: str = "0.15"


NORM_OUT = "gdn_norm_out"
"""The norm and the gate after a gated delta net: `GatedDeltaNet._gated_norm_and_a2a`."""

RECOMPUTED = (
    RecomputeModule("core_attn", (ATTENTION,), ("core",)),
    RecomputeModule("layernorm", (ATTENTION, MLP), ("norm",), discards_output=True, experts=(EXPERTS.norm,)),
    RecomputeModule("mlp", (MLP,), ("column_parallel", "code", "row_parallel")),
    RecomputeModule("moe", experts=EXPERTS_WITH_SHARED.names[1:-1]),
    RecomputeModule("moe_act", discards_output=True, experts=(EXPERTS_ACTIVATION,), needs="grouped_gemm"),
    RecomputeModule("shared_experts", experts=SHARED_EXPERTS),
    RecomputeModule(
        "mla_up_proj",
        (LATENT[True, True, False],),
        ("up_projection", "query_projection", "code"),
        discards_output=True,
        needs="latent",
    ),
    RecomputeModule(NORM_OUT, discards_output=True, needs="gated_delta", since="0.19"),
)


def runs_again(module: RecomputeModule, section: Section) -> frozenset[str]:
    """The items of a section that a module makes again. A word that only latent attention has says nothing of another."""
    if section.half not in {each.half for each in module.sections} or section.in_some_layers:
        return frozenset()
    if module.needs == "latent" and section.column_parallel:
        return frozenset()
    return frozenset(item.name for item in section.items if item.role in module.roles)


def recompute_module(name: str) -> RecomputeModule:
    """Raises `KeyError` for a word that no release knows."""
    return {module.name: module for module in RECOMPUTED}[name]


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
