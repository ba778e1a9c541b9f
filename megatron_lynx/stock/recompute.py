"""Megatron's `--recompute-modules`, as data: what each runs again, and what is let go for it.

    checkpoint         the module keeps its arguments alone; its inside is made again when its backward begins
    output discarded   (`CheckpointWithoutOutput`) its output is freed as well, although the next module reads it in backward; it
                       is made again when the gradient of what lies behind that module is there

Read in `transformer_config.py`, `transformer_layer.py`, `attention.py` and `moe/` of megatron-core 0.16.1 to 0.19.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_lynx.anatomy import ATTENTION, EXPERTS, EXPERTS_WITH_SHARED, LATENT, MLP, SHARED_EXPERTS, Role, Section
from megatron_lynx.kinds.experts.section import EXPERTS_ACTIVATION

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


RECOMPUTED = (
    RecomputeModule("core_attn", (ATTENTION,), ("core",)),
    RecomputeModule("layernorm", (ATTENTION, MLP), ("norm",), discards_output=True, experts=(EXPERTS.norm,)),
    RecomputeModule("mlp", (MLP,), ("column_parallel", "code", "row_parallel")),
    RecomputeModule("moe", experts=EXPERTS_WITH_SHARED.names[1:-1]),
    RecomputeModule("moe_act", discards_output=True, experts=(EXPERTS_ACTIVATION,), needs="grouped_gemm"),
    RecomputeModule("shared_experts", experts=SHARED_EXPERTS),
    RecomputeModule(
        "mla_up_proj", (LATENT[True, True],), ("up_projection", "query_projection", "code"), discards_output=True, needs="latent"
    ),
    RecomputeModule("gdn_norm_out", discards_output=True, needs="gated_delta", since="0.19"),
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
