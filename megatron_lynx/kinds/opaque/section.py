"""Halves that a job lists by layer: opaque ones, whose modules are not known, so that they are kept whole, and others.

    attention    input_layernorm ─> gated_attention, own_attention, ... ─> attention_bda
    mlp          pre_mlp_layernorm ─> own_mlp ─> mlp_bda

    gated_attention   usual attention with an output gate (`--attention-output-gate`)
    own_attention     a fork's
    own_mlp           a fork's
    no_attention      absent: a hybrid stack's MLP or experts without attention
    no_mlp            absent: an attention or Mamba layer without MLP
    gated_delta_net   planned by its items (`kinds.mamba`)
    mamba             the same: a Mamba layer of a hybrid stack (`kinds.mamba`)

Opaque ones have no hooks and no windows: random numbers, collectives and saved tensors are the same as without a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.mamba.section import DELTA_NET, MAMBA
from megatron_lynx.kinds.section import Item, Section

OpaqueName = Literal["gated_delta_net", "gated_attention", "mamba", "own_attention", "no_attention", "own_mlp", "no_mlp"]
NOTHING: tuple[OpaqueName, OpaqueName] = ("no_attention", "no_mlp")
IN_NODES: tuple[OpaqueName, ...] = ("gated_delta_net", "gated_attention", "own_attention")
"""Halves that Megatron's combined schedule can call in a node (`_forward_attention`)."""


def _opaque(name: OpaqueName, usual: Section) -> Section:
    norm, residual = (Item(getattr(usual, role), role) for role in ("norm", "residual"))
    items = (norm, Item(name, "opaque"), residual)
    return Section(name, usual.half, usual.method, items, fuses_norm=False, in_some_layers=True, opaque=True)


OPAQUE: Mapping[OpaqueName, Section] = {
    "gated_delta_net": DELTA_NET,
    "mamba": MAMBA,
    **{name: _opaque(name, ATTENTION) for name in ("gated_attention", "own_attention", "no_attention")},
    **{name: _opaque(name, MLP) for name in ("own_mlp", "no_mlp")},
}
