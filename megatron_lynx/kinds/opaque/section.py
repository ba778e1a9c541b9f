"""Halves that nobody looks into, because their layers have something else there than the sites that are known: kept whole.

    attention    input_layernorm ─> gated_delta_net, mamba, ... ─> attention_bda
    mlp          pre_mlp_layernorm ─> own_mlp ─> mlp_bda

    gated_delta_net   linear attention of Qwen3-Next (`--experimental-attention-variant gated_delta_net`)
    gated_attention   the usual attention with a gate on what it makes (`--attention-output-gate`)
    mamba             a Mamba layer of a hybrid stack
    own_attention     a fork's
    own_mlp           a fork's
    no_attention      nothing: a hybrid stack has an MLP, or experts, without an attention before it
    no_mlp            nothing: an attention, or a Mamba layer, without an MLP behind it

No hook is inside one, or on the method that runs it, so it runs as without a plan: random numbers, collectives and what it saves
for backward are its own. Its collectives are no windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.section import Item, Section

OpaqueName = Literal["gated_delta_net", "gated_attention", "mamba", "own_attention", "no_attention", "own_mlp", "no_mlp"]
NOTHING: tuple[OpaqueName, OpaqueName] = ("no_attention", "no_mlp")
"""Those of halves that are not there, by half."""
IN_NODES: tuple[OpaqueName, ...] = ("gated_delta_net", "gated_attention", "own_attention")
"""Those that a node of Megatron's combined schedule calls as it calls every attention half (`_forward_attention`)."""


def _opaque(name: OpaqueName, usual: Section) -> Section:
    norm, residual = (Item(getattr(usual, role), role) for role in ("norm", "residual"))
    items = (norm, Item(name, "opaque"), residual)
    return Section(name, usual.half, usual.method, items, fuses_norm=False, profiled=name, opaque=True)


OPAQUE: Mapping[OpaqueName, Section] = {
    **{
        name: _opaque(name, ATTENTION)
        for name in ("gated_delta_net", "gated_attention", "mamba", "own_attention", "no_attention")
    },
    **{name: _opaque(name, MLP) for name in ("own_mlp", "no_mlp")},
}
