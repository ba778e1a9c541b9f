"""Latent attention of one layer of one rank by its shape: FLOPs, bytes that kernels move, every block that backward reads.

Letters as in `profiler.shape`; q and k: what queries, and keys with values, are compressed to; r: the rotary part of a head.

    item                   takes      makes                    its rows
    linear_q_down_proj     h          q                        Megatron's own: all, a t-th of the columns, then gathered
    linear_kv_down_proj    h          k + r                    Transformer Engine's: the rank's own, all columns
    q_, kv_layernorm       q, k       q, k                     as many as are handed on
    linear_q_up_proj       q          a (d + r) / t            all
    linear_kv_up_proj      k          a (d + v) / t            all
    rotary                 both       queries and keys of a (d + r) / t, values of a v / t: three blocks of their own

`linear_proj` reads a v / t columns. Sine and cosine are kept for queries and for keys: the rotary embedding is not fused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lynx.anatomy import Item, Section
from megatron_lynx.anatomy.dense import CORE_ATTENTION, LINEAR_PROJ, ROTARY
from megatron_lynx.anatomy.latent import KV_DOWN, KV_NORM, KV_UP, Q_DOWN, Q_NORM, Q_PROJ, Q_UP
from megatron_lynx.latent_sizes import LatentSizes
from megatron_lynx.profiler.element_wise import FP32_BYTES, Kernels, one_kernel, turned_kernels
from megatron_lynx.profiler.exchanged import AttentionBytes, kept_beside_exchange
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.shape import LayerShape


@dataclass(frozen=True)
class LatentShape:
    """The latent attention of a layer's shape."""

    layer: LayerShape
    sizes: LatentSizes
    section: Section

    @classmethod
    def of(cls, layer: LayerShape) -> LatentShape:
        """Of a layer that has it."""
        section = layer.model.latent_section
        assert section is not None, "a model with latent attention"
        assert layer.model.latent is not None, "which has sizes"
        return cls(layer, layer.model.latent, section)

    @property
    def heads(self) -> int:
        return self.layer.model.heads // self.layer.parallel.tensor

    @property
    def latent_rows(self) -> int:
        """Rows of what was compressed that a rank holds: Megatron's own layers gather all, and cut them in the same block."""
        return self.layer.own_tokens if self.layer.model.uses_te else self.layer.tokens

    def linear(self, name: str) -> tuple[int, int, int]:
        """Rows of a linear on one rank, and columns of what it takes and makes."""
        sizes, hidden, te = self.sizes, self.layer.model.hidden, self.layer.model.uses_te
        whole = 1 if te else self.layer.parallel.tensor
        rows = self.layer.own_tokens if te else self.layer.tokens
        return {
            Q_DOWN.name: (rows, hidden, (sizes.q_rank or 0) // whole),
            KV_DOWN.name: (rows, hidden, sizes.kv_down_width // whole),
            Q_PROJ.name: (self.layer.tokens, hidden, self.heads * sizes.query_head_size),
            Q_UP.name: (self.layer.tokens, sizes.q_rank or 0, self.heads * sizes.query_head_size),
            KV_UP.name: (self.layer.tokens, sizes.kv_rank, self.heads * sizes.kv_head_size),
            LINEAR_PROJ: (self.layer.tokens, self.heads * sizes.value_head_size, hidden),
        }[name]

    def flops(self) -> dict[str, int]:
        """FLOPs of the GEMMs in one forward of each item, as torch's FlopCounterMode counts them."""
        flops = dict.fromkeys(self.section.names, 0)
        for item in self.section.items:
            if item.is_linear:
                rows, inside, outside = self.linear(item.name)
                flops[item.name] = 2 * rows * inside * outside
        flops[CORE_ATTENTION] = 2 * self.layer.scores * (self.sizes.query_head_size + self.sizes.value_head_size)
        return flops

    def attention_bytes(self) -> AttentionBytes:
        """What the core attention reads and writes."""
        one = self.layer.model.element_bytes * self.layer.tokens * self.heads
        query, value = one * self.sizes.query_head_size, one * self.sizes.value_head_size
        return AttentionBytes(query, query, value, value)

    def kernels(self, item: Item) -> Kernels:
        """What an item without a GEMM runs that only latent attention has, or has otherwise."""
        element, sizes = self.layer.model.element_bytes, self.sizes
        if item.role == "inner_norm":
            one = element * self.latent_rows * self.rank_of(item) * self.layer.model.qk_norm
            return one_kernel(2 * one, 3 * one)
        taken = self.heads * (sizes.query_head_size + sizes.kv_head_size)
        made = self.heads * (2 * sizes.query_head_size + sizes.value_head_size)
        both = element * self.layer.tokens * (taken + made)
        widths = (self.heads * sizes.rope_size, sizes.rope_size)
        queries, key = (turned_kernels(self.layer, width, sizes.rope_size, interleaved=True) for width in widths)
        return one_kernel(both, both) + queries + key

    def rank_of(self, norm: Item) -> int:
        """What an inner norm's rows are as wide as."""
        return self.sizes.kv_rank if norm is KV_NORM else self.sizes.q_rank or 0

    def tensors(self) -> Iterator[SavedTensor]:
        """What it keeps between the norm of the residual stream, whose output is among it, and the core attention."""
        yield from self._normed()
        if self.sizes.compressed:
            yield from self._compressed(Q_DOWN, Q_NORM, Q_UP, self.sizes.q_rank or 0, self.sizes.q_rank or 0)
        yield from self._compressed(KV_DOWN, KV_NORM, KV_UP, self.sizes.kv_down_width, self.sizes.kv_rank)
        yield from self._heads()

    def _normed(self) -> Iterator[SavedTensor]:
        model, rows, norm = self.layer.model, self.layer.own_tokens, self.section.norm
        layernorm = model.norm == "layernorm"
        one = FP32_BYTES if model.uses_te else model.element_bytes
        yield from (SavedTensor(bytes=rows * one, made_by=norm, saved_by=(norm,)) for _ in range(1 + layernorm))
        if self.layer.eager and not layernorm:
            yield SavedTensor(bytes=self.layer.input_bytes, made_by=norm, saved_by=(norm,))  # before the weight
        readers = tuple(item.name for item in self.section.items if item.role in ("down_projection", "query_projection"))
        yield SavedTensor(bytes=self.layer.input_bytes, made_by=norm, saved_by=readers, output=True)

    def _compressed(self, down: Item, norm: Item, up: Item, width: int, rank: int) -> Iterator[SavedTensor]:
        """One path's, from its down-projection to what its up-projection reads. What was gathered stays for replays that pass
        it, as long as `linear_proj`'s input, which always stays. Transformer Engine's linears, norm inside or not, keep what they
        were called with, or a copy where that is a part of a wider block."""
        model, rows = self.layer.model, self.latent_rows
        element, layernorm, stays = model.element_bytes, model.norm == "layernorm", ()
        if not model.uses_te and self.layer.parallel.tensor > 1:
            stays = (LINEAR_PROJ,)  # type: ignore[assignment]
        reader = norm.name if model.qk_norm and not model.uses_te else up.name
        copied = model.uses_te and width != rank
        readers = () if copied else (reader, *stays)
        yield SavedTensor(bytes=rows * width * element, made_by=down.name, saved_by=readers, output=True)
        if copied:
            yield SavedTensor(bytes=rows * rank * element, made_by=up.name, saved_by=(up.name,))
        if not model.qk_norm:
            return
        rows = self.layer.own_tokens
        one = FP32_BYTES if model.uses_te else element
        yield from (SavedTensor(bytes=rows * one, made_by=norm.name, saved_by=(norm.name,)) for _ in range(1 + layernorm))
        if self.layer.eager and not layernorm:
            yield SavedTensor(bytes=rows * rank * element, made_by=norm.name, saved_by=(norm.name,))
        yield SavedTensor(bytes=rows * rank * element, made_by=norm.name, saved_by=(up.name,), output=not model.uses_te)

    def _heads(self) -> Iterator[SavedTensor]:
        sizes, one = self.sizes, self.layer.tokens * self.layer.model.element_bytes
        for linear in (Q_UP if sizes.compressed else Q_PROJ, KV_UP):
            yield SavedTensor(bytes=one * self.linear(linear.name)[2], made_by=linear.name, saved_by=(), output=True)
        if self.layer.parallel.context > 1 and not self.layer.eager:
            yield from kept_beside_exchange(self.layer.parallel, self.attention_bytes(), ROTARY)
        else:
            query, key, value, _ = self.attention_bytes()
            yield from (SavedTensor(bytes=size, made_by=ROTARY, saved_by=(CORE_ATTENTION,)) for size in (query, key, value))
        table = self.layer.model.seq // self.layer.parallel.context * sizes.rope_size * self.layer.model.element_bytes
        yield from (SavedTensor(bytes=table, made_by=ROTARY, saved_by=(ROTARY,)) for _ in range(4))
