"""Planning of sparse attention.

Letters as in `kinds.latent`; I, i: heads of the indexer and their width; K: keys that a query attends to in the mean, at most
`keys` and half of the sequence. On one rank, per token, the core saves:

    fused       queries and shared key (k + r) a/t and k + r, result k a/t, log-sum-exp; indices of keys
    unfused     of each of the s scores of a head: 12 bytes, masks of one byte three times, and in 16 bits its copy
    both        product with the values' weights, from a copy of that part of the weight
    loss        input of three linears, key before its norm; fused: gradients of the indexer's queries, key and head weights,
                made in forward; unfused: these tensors themselves

FLOPs, forward, per token: attention 2K (2k + r) a/t (unfused: all s); both absorbed products 2k (d + v) a/t; indexer's linears
and its 2Ii scores per earlier token, on every rank; a loss, fused: the attention's scores over its keys, and the indexer's twice
for gradients; unfused in backward again. Fused kernels reach the rate of fused attention: 640 TFLOP/s on an H800 (README of
deepseek-ai/FlashMLA, token-level sparse prefill).

Sources: `AbsorbedMLASelfAttention` and `DSAttention` of megatron-core 0.19, `FusedIndexerSparseAttnFunc` of its cuDNN kernels.
Layers that share keys are priced as if each had an indexer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.core_attention import FUSED_BACKWARD
from megatron_lynx.kinds.dense.section import LINEAR_PROJ, ROTARY
from megatron_lynx.kinds.face import HalfParameters, Step, longer
from megatron_lynx.kinds.latent.planning import DOWN, HEADS, LatentAttention, heads_of, sizes_of
from megatron_lynx.kinds.latent.section import KV_DOWN, KV_NORM, Q_DOWN, Q_NORM, Q_PROJ, Q_UP, SparseSizes
from megatron_lynx.kinds.saved import dropout_tensor, norm_tensors, row_parallel, statistics
from megatron_lynx.kinds.section import Item
from megatron_lynx.kinds.sparse.section import CORE
from megatron_lynx.profiler.profile import HalfProfile, SavedTensor, own_tensors
from megatron_lynx.profiler.roofline import Kernels, Roofline, collective_s, kernels_s
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape, saved_bytes
from megatron_lynx.timeline import Passes

INDEX_BYTES = {True: 4, False: 8}


UNFUSED_BYTES = 48
"""Bytes that unfused attention moves for each score in forward: twelve fp32 values, in mask, softmax and their copies."""


class SparseAttention(LatentAttention):
    def half(self, job: Job, shape: LayerShape, roof: Roofline) -> HalfProfile:
        """Add collectives to the core: they are no windows. Forward gathers queries' and keys' latents, the indexer's inputs and
        the rotary key, and scatters the output; backward gathers its gradient and the queries' latent, and scatters the rest."""
        half, sizes, tensor = super().half(job, shape, roof), sizes_of(shape.model), shape.parallel.tensor
        queries, hidden = sizes.q_rank or shape.model.hidden, shape.model.hidden
        column, share = shape.tokens * shape.model.element_bytes, (tensor - 1) / tensor
        forward, backward = 2 * queries + sizes.kv_down_width + 2 * hidden, 2 * queries + sizes.kv_down_width + hidden
        waits_s = (collective_s(job.cluster, tensor, share * column * columns) for columns in (forward, backward))
        waits = Passes(*waits_s) + Passes(*2 * (roof.ring.seconds((shape.parallel.context - 1) * column * sizes.kv_down_width),))
        return longer(half, CORE.name, waits)

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        if item.name != ROTARY:
            return super().kernels(shape, item)
        sizes, one = sizes_of(shape.model), shape.model.element_bytes * shape.tokens
        turned = one * (heads_of(shape) + 1) * sizes.rope_size
        copied = one * (heads_of(shape) * (2 * sizes.kv_rank + sizes.rope_size) + sizes.kv_down_width)
        return Kernels((2 * copied, 4 * turned), (2 * copied, 4 * turned))

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        sizes, heads = sizes_of(shape.model), heads_of(shape)
        if item.name == ROTARY:
            return kernels_s(self.kernels(shape, item), roof) + _product_s(shape, roof, sizes.head_size)
        if item != CORE:
            return super().seconds(shape, item, roof)
        sparse, trained = sparse_of(shape.model), sparse_of(shape.model).loss != "none"
        linears = 2 * shape.tokens * _indexer_weights(shape.model)
        around = Passes(roof.linear_s(linears, 0), roof.linear_s(2 * linears, 0) if trained else 0.0)
        around += _product_s(shape, roof, sizes.value_head_size)
        attended = 2 * shape.tokens * heads * (sizes.kv_rank + sizes.kv_down_width)  # FLOPs per key
        indexed = 2 * shape.tokens * sparse.heads * sparse.head_size
        earlier, seen, moved = shape.model.seq / 2, _seen_keys(shape), shape.model.element_bytes * shape.tokens * heads
        over = 0.0 if not trained else seen if sparse.loss == "selected" else earlier
        if sparse.fused:
            kernel, one = shape.model.attention_kernel, moved * (sizes.kv_rank + sizes.kv_down_width)
            forward = seen * attended + over * attended / 2 + (earlier + 2 * over) * indexed
            alone = roof.attention_s(forward, one, kernel), roof.attention_s(FUSED_BACKWARD * seen * attended, 2 * one, kernel)
            return around + Passes(*alone)
        every, scores = shape.model.seq, shape.scores * UNFUSED_BYTES
        learned = trained * every * (attended / 2 + 2 * indexed)
        forward = every * (attended + indexed) + trained * every * attended / 2
        return around + Passes(
            roof.seconds(forward, (1 + trained) * scores), roof.seconds(2 * every * attended + learned, (2 + trained) * scores)
        )

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        model, sizes, sparse = shape.model, sizes_of(shape.model), sparse_of(shape.model)
        element, tokens, heads, recipe = model.element_bytes, shape.tokens, heads_of(shape), shape.model.fp8_recipe
        trained, gathers = sparse.loss != "none", shape.parallel.sequence_parallel
        indexed = (CORE.name,) if trained and not gathers else ()
        linears = [item.name for item in self._with_role(*DOWN, "query_projection")]
        yield from norm_tensors(shape, self.section, (*(linears if recipe is None else ()), *indexed))
        if recipe is not None:
            for linear in linears:
                yield from own_tensors(linear, saved_bytes(recipe, shape.own_tokens, model.hidden))
        if sizes.q_rank is not None:
            yield from self._latent(shape, Q_DOWN, Q_NORM, sizes.q_rank, (*((Q_UP.name,) if recipe is None else ()), *indexed))
            if recipe is not None:
                yield from own_tensors(Q_UP.name, saved_bytes(recipe, shape.own_tokens, sizes.q_rank))
        yield from self._latent(shape, KV_DOWN, KV_NORM, sizes.kv_rank, ())
        made = Q_UP.name if sizes.compressed else Q_PROJ.name
        queries, key = element * tokens * heads * sizes.kv_down_width, element * tokens * sizes.kv_down_width
        yield SavedTensor(bytes=element * tokens * heads * sizes.query_head_size, made_by=made, saved_by=(ROTARY,), output=True)
        if not sizes.fused_rotary:
            yield from own_tensors(ROTARY, *4 * [model.seq // shape.parallel.context * sizes.rope_size * element])
        read = sparse.fused or trained  # else in copies: of fp32, and of the key for each head
        yield SavedTensor(bytes=queries, made_by=ROTARY, saved_by=(CORE.name,) if read or element == FP32_BYTES else ())
        yield SavedTensor(bytes=key, made_by=ROTARY, saved_by=(CORE.name,) if read else ())
        yield from own_tensors(CORE.name, *self._inside(shape))
        if trained and gathers:
            yield from own_tensors(CORE.name, element * tokens * model.hidden, element * tokens * (sizes.q_rank or model.hidden))
        result = element * tokens * heads * sizes.value_head_size
        yield SavedTensor(bytes=result, made_by=CORE.name, saved_by=(LINEAR_PROJ,) if recipe is None else (), output=True)
        if recipe is not None:
            yield from own_tensors(LINEAR_PROJ, saved_bytes(recipe, tokens, heads * sizes.value_head_size))
        yield dropout_tensor(shape, self.section)

    def _latent(self, shape: LayerShape, down: Item, inner: Item, rank: int, readers: tuple[str, ...]) -> Iterator[SavedTensor]:
        normed, width = shape.own_tokens * rank * shape.model.element_bytes, self.linears(shape)[down.name].made
        made = shape.own_tokens * width * shape.model.element_bytes
        if not shape.model.qk_norm:
            yield SavedTensor(bytes=made, made_by=down.name, saved_by=readers, output=True)
            return
        yield SavedTensor(bytes=made, made_by=down.name, saved_by=(inner.name,) if width == rank else (), output=True)
        yield from own_tensors(inner.name, *[normed] * (width != rank))
        yield from statistics(shape, inner.name, normed)
        yield SavedTensor(bytes=normed, made_by=inner.name, saved_by=readers, output=True)

    def _inside(self, shape: LayerShape) -> list[int]:
        """Bytes that the core saves besides its arguments."""
        model, sizes, sparse = shape.model, sizes_of(shape.model), sparse_of(shape.model)
        element, tokens, heads = model.element_bytes, shape.tokens, heads_of(shape)
        selected, latent = min(sparse.keys, model.seq), element * tokens * heads * sizes.kv_rank
        inside = [latent, element * heads * sizes.value_head_size * sizes.kv_rank]
        if sparse.fused or sparse.loss != "none":
            inside.append(tokens * selected * INDEX_BYTES[sparse.fused])
        if sparse.loss != "none":
            index = element * tokens * sparse.head_size
            inside += [sparse.heads * index, index, index, element * tokens * sparse.heads, 2 * FP32_BYTES * tokens]
            inside += 4 * [model.seq // shape.parallel.context * sizes.rope_size * element]
        if sparse.fused:
            return [*inside, FP32_BYTES * tokens * heads]
        columns = heads * (2 * sizes.kv_down_width if element < FP32_BYTES else sizes.kv_down_width)
        inside += [FP32_BYTES * tokens * columns, latent]
        return [*inside, shape.scores * (2 * FP32_BYTES + element + 3 * MASK_BYTES)]

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        """The indexer is whole on each rank. Its norm has a bias. `passed` counts attention over the selected keys."""
        usual, sizes, sparse = super().parameters(model, layout), sizes_of(model), sparse_of(model)
        indexer, seen = _indexer_weights(model), min(sparse.keys, model.seq / 2)
        scored = round(
            model.heads * seen * (sizes.kv_rank + sizes.kv_down_width) + sparse.heads * sparse.head_size * model.seq / 2
        )
        return replace(
            usual,
            passed=usual.passed + usual.whole + indexer + scored,
            vectors=usual.vectors + 2 * sparse.head_size,
            weights=usual.weights + 1 + 3 + 2,  # linear_kv_up_proj is no item
            whole=usual.whole + indexer,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """Gradients of the core's arguments; unfused, of its scores, in fp32."""
        element, sizes, heads = shape.model.element_bytes, sizes_of(shape.model), heads_of(shape)
        one = element * shape.tokens
        result, latent, given = (one * heads * width for width in (sizes.value_head_size, sizes.kv_rank, sizes.kv_down_width))
        yield from row_parallel(shape, self.section, result)
        within = 3 * FP32_BYTES * shape.scores if not sparse_of(shape.model).fused else FP32_BYTES * given // element
        yield Step(CORE.name, latent + given + within, latent + result + within)
        made = Q_UP.name if sizes.compressed else Q_PROJ.name
        queries = one * self.linears(shape)[made].made
        yield Step(ROTARY, queries + latent, latent + given)
        yield from self._paths_back(shape, (*self._with_role(*HEADS), *reversed(self._with_role(*DOWN))))

    def refusals(self, job: Job) -> Iterator[Problem]:
        if job.parallel.tensor > 1 and not job.parallel.sequence_parallel:
            yield Problem("job: parallel.sequence_parallel", "false", "true with several tensor-parallel ranks: Megatron stops")
        if not job.model.uses_te:
            yield Problem("job: model.implementation", job.model.implementation, "transformer_engine: Megatron has no other")


def sparse_of(model: Model) -> SparseSizes:
    sparse = sizes_of(model).sparse
    assert sparse is not None, "asked only of sparse attention"
    return sparse


def _indexer_weights(model: Model) -> int:
    """Weights of the indexer's linears: queries from their latent, a key and a weight per head from the half's normed input."""
    sparse = sparse_of(model)
    queries = (sizes_of(model).q_rank or model.hidden) * sparse.heads * sparse.head_size
    return queries + model.hidden * (sparse.head_size + sparse.heads)


def _seen_keys(shape: LayerShape) -> float:
    """Keys that a query attends to, in the mean over a causal sequence."""
    seq, keys = shape.model.seq, min(sparse_of(shape.model).keys, shape.model.seq)
    return keys - keys**2 / (2 * seq)


def _product_s(shape: LayerShape, roof: Roofline, width: int) -> Passes:
    """Return the seconds of a product with a part of the up-projection's weight, a GEMM for each head."""
    heads, rank, element = heads_of(shape), sizes_of(shape.model).kv_rank, shape.model.element_bytes
    flops, moved = 2 * shape.tokens * heads * rank * width, element * heads * (shape.tokens * (rank + width) + rank * width)
    return Passes(roof.batched_s(heads, flops, moved), 2 * roof.batched_s(heads, flops, moved))
