"""Sections of multi-latent attention (`--multi-latent-attention`): tokens are compressed, and heads made from that.

    input_layernorm ─┬─> linear_q_down_proj ──> q_layernorm ──> linear_q_up_proj ──┬─(rotary)─> core_attention ─> linear_proj
                     └─> linear_kv_down_proj ─> kv_layernorm ─> linear_kv_up_proj ─┘

Uncompressed queries come from `linear_q_proj` on the residual stream. Inner norms exist only with `--qk-layernorm`; Transformer
Engine, whose layers these are, fuses them into the next linears. Down-projections are whole on each tensor-parallel rank; with
sequence parallelism the shared rotary key is gathered, and so is the input of up-projections; backward reduces its gradient.

Recomputed code between two sites must not communicate: gathered tensors there are kept (`apply.hooks.collectives`).

The fused rotary kernel rotates queries in place, in the linear's output. Recomputing `rotary` on a kept output would rotate it
twice, so both are kept or both recomputed.

    latent: {kv_rank: 512, head_size: 128, rope_size: 64, value_head_size: 128}                     DeepSeek-V2-Lite
    latent: {q_rank: 1536, kv_rank: 512, head_size: 128, rope_size: 64, value_head_size: 128}       DeepSeek-V3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, Literal

from pydantic import Field

from megatron_lynx.kinds.dense.section import ATTENTION, LINEAR_PROJ, ROTARY
from megatron_lynx.kinds.section import Collective, Item, Pass, Role, Section
from megatron_lynx.validation import Part

Q_DOWN = Item("linear_q_down_proj", "down_projection", path="self_attention.linear_q_down_proj")
KV_DOWN = Item("linear_kv_down_proj", "down_projection", path="self_attention.linear_kv_down_proj")
Q_NORM = Item("q_layernorm", "inner_norm", path="self_attention.q_layernorm")
KV_NORM = Item("kv_layernorm", "inner_norm", path="self_attention.kv_layernorm")
Q_PROJ = Item("linear_q_proj", "query_projection", path="self_attention.linear_q_proj")
Q_UP = Item("linear_q_up_proj", "up_projection", path="self_attention.linear_q_up_proj", norm_inside="q_layernorm")
KV_UP = Item("linear_kv_up_proj", "up_projection", path="self_attention.linear_kv_up_proj", norm_inside="kv_layernorm")

HEADS: tuple[Role, ...] = ("up_projection", "query_projection")
_NORM, _BEHIND = ATTENTION.items[0], tuple(ATTENTION.items[ATTENTION.index(ROTARY) :])


def _forward(order: tuple[Item, ...], sequence_parallel: bool) -> Iterator[Collective]:
    """`order`: items from the norm to the last up-projection."""
    for before, item in pairwise(order) if sequence_parallel else ():
        if item.role in HEADS:
            yield Collective("all_gather", "input", before.name, of=item.name)
        if item is KV_DOWN:
            yield Collective("all_gather", "latent", item.name, of=item.name)
    yield Collective("reduce_scatter" if sequence_parallel else "all_reduce", "output", LINEAR_PROJ)


def _backward(order: tuple[Item, ...], sequence_parallel: bool) -> Iterator[Collective]:
    if sequence_parallel:
        yield Collective("all_gather", "gradient", "residual")
    for item in reversed(order):
        if item is KV_DOWN and sequence_parallel:
            yield Collective("reduce_scatter", "latent", item.name, of=item.name)
        if item.role not in HEADS:
            continue
        if sequence_parallel:
            yield Collective("all_gather", "input", item.name, beside="dgrad", of=item.name)
        kind: Literal["reduce_scatter", "all_reduce"] = "reduce_scatter" if sequence_parallel else "all_reduce"
        yield Collective(kind, "input_gradient", item.name, beside="wgrad", of=item.name)


def _section(compressed: bool, fused: bool) -> Section:
    whole = (_NORM, Q_DOWN, KV_DOWN, Q_NORM, KV_NORM, Q_UP, KV_UP)
    order = whole if compressed else (_NORM, KV_DOWN, KV_NORM, Q_PROJ, KV_UP)
    collectives: dict[tuple[Pass, bool], tuple[Collective, ...]] = {}
    for sliced in (False, True):
        collectives["fwd", sliced] = tuple(_forward(order, sliced))
        collectives["bwd", sliced] = tuple(_backward(order, sliced))
    turned = ((Q_UP if compressed else Q_PROJ).name, ROTARY) if fused else ()
    items = (*order, *_BEHIND)
    return Section(
        "latent", ATTENTION.half, ATTENTION.method, items, collectives, fuses_norm=False, two_paths=True, in_place=turned
    )


LATENT: Mapping[tuple[bool, bool], Section] = {
    (compressed, fused): _section(compressed, fused) for compressed, fused in product((True, False), repeat=2)
}
"""By compressed queries, and fused rotary kernel."""


IndexerLoss = Literal["none", "selected", "all"]


class SparseSizes(Part):
    """Sizes of sparse attention (`--experimental-attention-variant dsa`): every rank has an indexer, which selects keys."""

    heads: int = Field(ge=1)
    """Heads of the indexer (`dsa_indexer_n_heads`)."""
    head_size: int = Field(ge=1)
    """Width of such a head (`dsa_indexer_head_dim`)."""
    keys: int = Field(ge=1)
    """Keys per query (`dsa_indexer_topk`)."""
    loss: IndexerLoss = "none"
    """Keys that train the indexer."""
    fused: bool = False
    """Whether fused kernels select and attend (`dsa_kernel_backend`)."""
    shared: bool = False
    """Whether layers reuse the keys of an earlier one (`dsa_indexer_topk_freq`). Checkpoints keep such halves."""


SIZES = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "head_size": "qk_head_dim",
    "rope_size": "qk_pos_emb_head_dim",
    "value_head_size": "v_head_dim",
}
INDEXER = {"heads": "dsa_indexer_n_heads", "head_size": "dsa_indexer_head_dim", "keys": "dsa_indexer_topk"}
"""Names of sizes in Megatron's arguments and configurations."""


def trained_on(coefficient: float | None, only_selected: bool) -> IndexerLoss:
    """Keys that train an indexer, from Megatron's `dsa_indexer_loss_coeff` and `dsa_indexer_use_sparse_loss`."""
    return "none" if not coefficient else "selected" if only_selected else "all"


class LatentSizes(Part):
    """Widths in elements, over all tensor-parallel ranks."""

    q_rank: int | None = Field(default=None, ge=1)
    """Rank of compressed queries (`q_lora_rank`). If None, queries are projected from the residual stream."""
    kv_rank: int = Field(ge=1)
    """Rank of compressed keys and values, together (`kv_lora_rank`)."""
    head_size: int = Field(ge=1)
    """Width of a head's query and key without the rotary part (`qk_head_dim`)."""
    rope_size: int = Field(ge=1)
    """Width of the rotary part of a head's query, and of the key shared by all heads (`qk_pos_emb_head_dim`)."""
    value_head_size: int = Field(ge=1)
    """Width of a head's value (`v_head_dim`)."""
    fused_rotary: bool = False
    """Whether fused kernels rotate queries in place and assemble keys (`apply_rope_fusion`)."""
    sparse: SparseSizes | None = None
    """Sizes of sparse attention, whose heads are never made from compressed keys and values."""

    @classmethod
    def of(cls, config: Any, *, sparse: bool) -> LatentSizes:
        """Sizes in a configuration of Megatron's."""
        indexer = None
        if sparse:
            indexer = SparseSizes(
                **{size: getattr(config, name) for size, name in INDEXER.items()},
                loss=trained_on(config.dsa_indexer_loss_coeff, config.dsa_indexer_use_sparse_loss),
                fused=config.dsa_kernel_backend != "none",
                shared=config.dsa_indexer_topk_freq > 1,
            )
        sizes = {size: getattr(config, name) for size, name in SIZES.items()}
        return cls(**sizes, fused_rotary=bool(config.apply_rope_fusion), sparse=indexer)

    @property
    def compressed(self) -> bool:
        return self.q_rank is not None

    @property
    def query_head_size(self) -> int:
        return self.head_size + self.rope_size

    @property
    def kv_down_width(self) -> int:
        """Output columns of the keys' and values' down-projection: latent and shared rotary key."""
        return self.kv_rank + self.rope_size

    @property
    def kv_head_size(self) -> int:
        """Output columns per head of the keys' and values' up-projection."""
        return self.head_size + self.value_head_size


CORE = Item("sparse_attention", "sparse_core", path=ATTENTION.item("core").path)


def _sparse_section(compressed: bool) -> Section:
    items = (item for item in LATENT[compressed, False].items if item != KV_UP)
    absorbed = (CORE if item.role == "core" else replace(item, norm_inside="") for item in items)
    return Section("sparse", ATTENTION.half, ATTENTION.method, tuple(absorbed), fuses_norm=False, two_paths=True)


SPARSE: Mapping[bool, Section] = {compressed: _sparse_section(compressed) for compressed in (True, False)}
"""By compressed queries: sparse attention (`--experimental-attention-variant dsa`, DeepSeek-V3.2), from megatron-core 0.19 on.

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


def core_kept(section: Section, sizes: LatentSizes | None, low_precision: object) -> bool:
    """Return whether checkpoints may not run a section's core again: sparse attention whose layers share keys, or in FP8, since
    linears inside of a site have states that a recomputation would change. `low_precision`: FP8 or FP4, if any."""
    sparse = None if sizes is None or section.name != SPARSE[True].name else sizes.sparse
    return sparse is not None and bool(sparse.shared or low_precision)
