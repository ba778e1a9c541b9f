"""Latent attention of a run: where it is, and the hook on what it gathers between sites."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks import latents
from megatron_lynx.apply.live_run import IDENTITY, LINEARS, TE_MODULE, LiveRun, module_at, name_of
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.dense.running import LOCAL, TE
from megatron_lynx.kinds.held import Classes, Layers, Running
from megatron_lynx.kinds.latent.section import KV_DOWN, LATENT, Q_DOWN
from megatron_lynx.kinds.latent.sizes import LatentSizes
from megatron_lynx.kinds.section import Section
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.engine import Engine

ATTENTION_CLASS = "megatron.core.transformer.multi_latent_attention.MLASelfAttention"
"""The one with fused down-projections is another."""

_COLUMNS = (f"{LINEARS}ColumnParallelLinear",)

ANY = LATENT[True, True, False]


class HeldLatentAttention(Running):
    """Megatron's `MLASelfAttention`."""

    half, name = ANY.half, ANY.name
    recorded, recorded_as = "latent", "latent attention does"
    local: ClassVar[Classes] = {**LOCAL, "down_projection": _COLUMNS, "up_projection": _COLUMNS, "query_projection": _COLUMNS}
    te: ClassVar[Classes] = {
        **TE,
        "down_projection": (f"{TE_MODULE}TELinear",),
        "inner_norm": (IDENTITY,),
        "up_projection": (f"{TE_MODULE}TELayerNormColumnParallelLinear", f"{TE_MODULE}TEColumnParallelLinear"),
        "query_projection": (f"{TE_MODULE}TEColumnParallelLinear",),
    }
    always_local = False

    def section_in(self, layer: Module) -> Section | None:
        if name_of(module_at(layer, KV_DOWN.path.rpartition(".")[0])) != ATTENTION_CLASS:
            return None
        te = name_of(module_at(layer, KV_DOWN.path)).startswith(TE_MODULE)
        config: Any = layer.config
        return LATENT[module_at(layer, Q_DOWN.path) is not None, te, bool(config.apply_rope_fusion)]

    def mismatches(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        if not run.layers:
            return
        found, needed = plan.model.latent_attention, sizes_in(run.config) if layers else None
        if found != needed:
            stated = f"{needed}, as this run has it"
            yield Problem("plan: model.latent_attention", str(found), stated, "make a plan for this model")

    def claims(self, engine: Engine, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Claim]:
        if run.tensor > 1:
            yield from latents.claims(engine)


def sizes_in(config: Any) -> LatentSizes:
    """The sizes of latent attention in Megatron's model config."""
    return LatentSizes(
        q_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        head_size=config.qk_head_dim,
        rope_size=config.qk_pos_emb_head_dim,
        value_head_size=config.v_head_dim,
        fused_rotary=bool(config.apply_rope_fusion),
    )
