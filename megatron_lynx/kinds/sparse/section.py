"""Sections of sparse attention (`--experimental-attention-variant dsa`, DeepSeek-V3.2), from megatron-core 0.19 on.

    input_layernorm ─┬─> linear_q_down_proj ──> q_layernorm ─┬─> linear_q_up_proj ─(rotary)─> sparse_attention ─> linear_proj
                     ├─> linear_kv_down_proj ─> kv_layernorm │ ───────────────────────┘              │
                     └───────────────────────────────────────┴───── indexer, inside ─────────────────┘

Attention is absorbed: `rotary` multiplies queries by the keys' part of `linear_kv_up_proj`'s weight, and the core multiplies its
result by the values' part, so that all heads share one key and value of the latent's width. That linear is never called: it is no
item. Inner norms are modules of their own, because the indexer reads their output.

The core selects keys and trains its indexer. Only a checkpoint of the half recomputes it, and logs its loss once. Its collectives
depend on loss and kernels, so the half has no tensor-parallel windows.

    latent: {q_rank: 1536, ..., sparse: {heads: 64, head_size: 128, keys: 2048, loss: selected, fused: true}}    DeepSeek-V3.2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_lynx.kinds.dense.section import ATTENTION
from megatron_lynx.kinds.latent.section import KV_UP, LATENT, LatentSizes
from megatron_lynx.kinds.section import Item, Section

CORE = Item("sparse_attention", "sparse_core", path=ATTENTION.item("core").path)


def _section(compressed: bool) -> Section:
    items = (item for item in LATENT[compressed, True, False].items if item != KV_UP)
    absorbed = (CORE if item.role == "core" else replace(item, norm_inside="") for item in items)
    return Section("sparse", ATTENTION.half, ATTENTION.method, tuple(absorbed), fuses_norm=False, two_paths=True)


SPARSE: Mapping[bool, Section] = {compressed: _section(compressed) for compressed in (True, False)}
"""By compressed queries."""


def core_kept(section: Section, sizes: LatentSizes | None, low_precision: object) -> bool:
    """Return whether checkpoints may not run a section's core again: sparse attention whose layers share keys, or in FP8, since
    linears inside of a site have states that a recomputation would change. `low_precision`: FP8 or FP4, if any."""
    sparse = None if sizes is None or section.name != SPARSE[True].name else sizes.sparse
    return sparse is not None and bool(sparse.shared or low_precision)
