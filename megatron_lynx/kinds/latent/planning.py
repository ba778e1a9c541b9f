"""Planning of multi-latent attention.

Letters as in `profiler.shape`; q and k: ranks of compressed queries, and of keys with values; r: rotary part of a head.

    item                   input      output                   rows
    linear_q_down_proj     h          q                        the rank's own
    linear_kv_down_proj    h          k + r                    the rank's own
    q_, kv_layernorm       q, k       q, k                     those of its input
    linear_q_up_proj       q          a (d + r) / t            all
    linear_kv_up_proj      k          a (d + v) / t            all
    rotary                 both       queries and keys of a (d + r) / t, values of a v / t: three blocks

`linear_proj` reads a v / t columns. Sine and cosine are saved for queries and for keys; the fused kernel shares one buffer among
all layers, and rotates queries in place in the output of `linear_q_up_proj`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.core_attention import FUSED_BACKWARD, AttentionBytes, core_tensors, kept_beside_exchange, rotary_tables
from megatron_lynx.kinds.dense.section import CORE_ATTENTION, LINEAR_PROJ, ROTARY
from megatron_lynx.kinds.face import HalfParameters, Linear, Planning, Step, kept_of_argument, longer, made_bytes, normed_cast
from megatron_lynx.kinds.latent.section import (
    CORE,
    HEADS,
    KV_DOWN,
    KV_NORM,
    KV_UP,
    Q_DOWN,
    Q_NORM,
    Q_PROJ,
    Q_UP,
    LatentSizes,
    SparseSizes,
)
from megatron_lynx.kinds.saved import context_tensors, core, dropout_tensor, norm, norm_tensors, row_parallel, statistics
from megatron_lynx.kinds.section import Collective, Item
from megatron_lynx.profiler.profile import HalfProfile, Profile, SavedTensor, Shape, own_tensors
from megatron_lynx.profiler.roofline import Kernels, Roofline, collective_s, kernels_s, one_kernel, turned_kernels
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape, normed_bytes, saved_bytes
from megatron_lynx.timeline import Passes

DOWN = "down_projection"


class LatentAttention(Planning):
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        sizes, hidden, heads = sizes_of(shape.model), shape.model.hidden, heads_of(shape)
        linears = {
            Q_DOWN.name: Linear(shape.own_tokens, hidden, sizes.q_rank or 0),
            KV_DOWN.name: Linear(shape.own_tokens, hidden, sizes.kv_down_width),
            Q_PROJ.name: Linear(shape.tokens, hidden, heads * sizes.query_head_size),
            Q_UP.name: Linear(shape.tokens, sizes.q_rank or 0, heads * sizes.query_head_size),
            KV_UP.name: Linear(shape.tokens, sizes.kv_rank, heads * sizes.kv_head_size),
            LINEAR_PROJ: Linear(shape.tokens, heads * sizes.value_head_size, hidden),
        }
        return {name: linears[name] for name in self.section.linears}

    def core_flops(self, shape: LayerShape) -> int:
        sizes = sizes_of(shape.model)
        return 2 * shape.scores * (sizes.query_head_size + sizes.value_head_size)

    def attention(self, shape: LayerShape) -> AttentionBytes:
        one, sizes = shape.model.element_bytes * shape.tokens * heads_of(shape), sizes_of(shape.model)
        query, value = one * sizes.query_head_size, one * sizes.value_head_size
        return AttentionBytes(query, query, value, value)

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        element, sizes, heads = shape.model.element_bytes, sizes_of(shape.model), heads_of(shape)
        if item.role == "inner_norm":
            one = element * shape.own_tokens * _rank(sizes, item) * shape.model.qk_norm
            return one_kernel(2 * one, 3 * one)
        if sizes.fused_rotary:  # only the rotary part of queries
            columns = heads * (2 * sizes.rope_size + sizes.kv_head_size + sizes.query_head_size + sizes.value_head_size)
            one = element * shape.tokens * (columns + sizes.rope_size)
            return one_kernel(one, one)
        taken = heads * (sizes.query_head_size + sizes.kv_head_size)
        made = heads * (2 * sizes.query_head_size + sizes.value_head_size)
        moved_bytes = element * shape.tokens * (taken + made)
        widths = (heads * sizes.rope_size, sizes.rope_size)
        queries, key = (turned_kernels(shape, width, sizes.rope_size, interleaved=True) for width in widths)
        return one_kernel(moved_bytes, moved_bytes) + queries + key

    def seconds(self, shape: LayerShape, item: Item, roof: Roofline) -> Passes:
        if item.role != "inner_norm" or not shape.model.qk_norm:
            return super().seconds(shape, item, roof)
        return super().seconds(shape, item, roof) + normed_cast(
            shape, shape.own_tokens * _rank(sizes_of(shape.model), item), roof
        )

    def norm_casts(self, shape: LayerShape, item: Item) -> bool:
        return bool(item.norm_inside) and shape.model.qk_norm

    def output_bytes(self, shape: LayerShape, item: Item) -> int:
        if item.role == "inner_norm":
            return shape.own_tokens * _rank(sizes_of(shape.model), item) * shape.model.element_bytes
        return super().output_bytes(shape, item)

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        sizes = sizes_of(shape.model)
        readers = tuple(item.name for item in self.section.items if item.role in ("down_projection", "query_projection"))
        yield from norm_tensors(shape, self.section, readers if shape.model.fp8_recipe is None else ())
        if shape.model.fp8_recipe is not None:  # each casts it separately
            size = saved_bytes(shape.model.fp8_recipe, shape.own_tokens, shape.model.hidden)
            for linear in readers:
                yield from own_tensors(linear, size)
        if sizes.q_rank is not None:
            yield from self._compressed(shape, (Q_DOWN, Q_NORM, Q_UP), sizes.q_rank, sizes.q_rank)
        yield from self._compressed(shape, (KV_DOWN, KV_NORM, KV_UP), sizes.kv_down_width, sizes.kv_rank)
        yield from self._heads(shape)
        yield from core_tensors(shape)
        yield from context_tensors(shape)
        yield dropout_tensor(shape, self.section)

    def _compressed(self, shape: LayerShape, path: tuple[Item, Item, Item], width: int, rank: int) -> Iterator[SavedTensor]:
        """Yield the saved tensors of one path, from down-projection to the up-projection's input. Linears save their input, or a
        copy of a part of a wider block."""
        (down, norm, up), model, rows = path, shape.model, shape.own_tokens
        element, recipe = model.element_bytes, model.fp8_recipe
        copied, cast = width != rank, recipe is not None and not model.qk_norm
        readers = () if copied or cast else (up.name,)
        yield SavedTensor(bytes=rows * width * element, made_by=down.name, saved_by=readers, output=True)
        if recipe is not None and cast:
            yield from own_tensors(up.name, saved_bytes(recipe, rows, rank))
        elif copied:
            yield from own_tensors(up.name, rows * rank * element)
        if model.qk_norm:
            normed = shape.own_tokens * rank * element
            yield from statistics(shape, norm.name, normed)
            if recipe is not None:
                normed = normed_bytes(recipe, shape.own_tokens, rank, gathered=shape.parallel.sequence_parallel)
            yield SavedTensor(bytes=normed, made_by=norm.name, saved_by=(up.name,))

    def _heads(self, shape: LayerShape) -> Iterator[SavedTensor]:
        one, linears, given = shape.tokens * shape.model.element_bytes, self.linears(shape), self.attention(shape)
        if shape.parallel.context > 1 and not shape.eager:
            query, *other_tensors = kept_beside_exchange(shape.parallel, given, ROTARY)
        else:
            query, *other_tensors = (SavedTensor(bytes=size, made_by=ROTARY, saved_by=(CORE_ATTENTION,)) for size in given[:3])
        turned = self.section.in_place[0] if self.section.in_place and query.made_by == ROTARY else ""
        for item in self._with_role(*HEADS):
            readers = query.saved_by if item.name == turned else ()
            yield SavedTensor(bytes=one * linears[item.name].made, made_by=item.name, saved_by=readers, output=True)
        yield from (other_tensors if turned else (query, *other_tensors))
        if not self.section.in_place:
            yield from rotary_tables(shape, sizes_of(shape.model).rope_size)

    def _with_role(self, *roles: str) -> list[Item]:
        return [item for item in self.section.items if item.role in roles]

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        """Down-projections are whole on each rank. Only the last projection may have a bias."""
        sizes = sizes_of(model)
        queries = model.heads * sizes.query_head_size * (sizes.q_rank or model.hidden)
        keys_values = model.heads * sizes.kv_head_size * sizes.kv_rank
        down, projection = model.hidden * ((sizes.q_rank or 0) + sizes.kv_down_width), model.query_width * model.hidden
        inner = (sizes.q_rank or 0) + sizes.kv_rank if model.qk_norm else 0
        cut = queries + keys_values + projection
        return HalfParameters(
            cut=cut,
            passed=cut,
            vectors=model.norm_parameters() + (model.norm_parameters(inner) if inner else 0) + model.hidden * model.bias,
            weights=len(self.section.linears),
            biased=1,
            norms=1 + (1 + sizes.compressed if model.qk_norm else 0),
            whole=down,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        """Keys and queries are wider than values; two paths lead back from the heads."""
        element, linears, given = shape.model.element_bytes, self.linears(shape), self.attention(shape)
        yield from row_parallel(shape, self.section, given.value)
        yield from core(shape, given.query, (given.query + given.value) // 2)
        heads, down = self._with_role(*HEADS), self._with_role(DOWN)
        made = {item.name: shape.tokens * element * linears[item.name].made for item in heads}
        turned = made.get(self.section.in_place[0], 0) if self.section.in_place else 0  # gradients of queries are in place
        yield Step(ROTARY, sum(made.values()) - turned, given.query + given.key + given.value - turned)
        yield from self._paths_back(shape, (*reversed(heads), *reversed(down)))

    def _paths_back(self, shape: LayerShape, order: Iterable[Item]) -> Iterator[Step]:
        for item in order:
            linear, element = self.linears(shape)[item.name], shape.model.element_bytes
            weight = 0 if shape.keeps_gradient_blocks else linear.taken * linear.made * shape.added_gradient_bytes
            yield Step(item.name, linear.rows * linear.taken * element + weight, linear.rows * linear.made * element + weight)
        yield norm(shape, self.section, (len(self._with_role(DOWN)) + 1) * shape.input_bytes)

    def input_width(self, sizes: Shape, linear: str) -> int:
        latent = sizes_of(sizes)
        return {Q_UP.name: latent.q_rank or 0, KV_UP.name: latent.kv_rank}.get(linear, sizes.hidden)

    def carried_width(self, sizes: Shape, collective: Collective) -> int:
        return sizes_of(sizes).rope_size if collective.carries == "latent" else self.input_width(sizes, collective.of)

    def operands_bytes(self, profile: Profile, linear: str) -> tuple[int, int]:
        """Two linears with the same input count it twice."""
        sizes, half = profile.shape, profile.of(self.section)
        if linear == LINEAR_PROJ:
            return kept_of_argument(half, linear), profile.message_bytes
        made = made_bytes(half, linear)
        if linear in (Q_DOWN.name, KV_DOWN.name):
            return profile.gathered_input(half.input_bytes), made
        return profile.gathered_input(profile.message_bytes) * self.input_width(sizes, linear) // sizes.hidden, made


def sizes_of(model: Model | Shape) -> LatentSizes:
    assert model.latent is not None, "asked only of models with latent attention"
    return model.latent


def heads_of(shape: LayerShape) -> int:
    return shape.model.heads // shape.parallel.tensor


def _rank(sizes: LatentSizes, norm: Item) -> int:
    return sizes.kv_rank if norm is KV_NORM else sizes.q_rank or 0


INDEX_BYTES = {True: 4, False: 8}


UNFUSED_BYTES = 48
"""Bytes that unfused attention moves for each score in forward: twelve fp32 values, in mask, softmax and their copies."""


class SparseAttention(LatentAttention):
    """Letters as above; I, i: heads of the indexer and their width; K: keys that a query attends to in the mean, at most
    `keys` and half of the sequence. On one rank, per token, the core saves:

        fused       queries and shared key (k + r) a/t and k + r, result k a/t, log-sum-exp; indices of keys
        unfused     of each of the s scores of a head: 12 bytes, masks of one byte three times, and in 16 bits its copy
        both        product with the values' weights, from a copy of that part of the weight
        loss        input of three linears, key before its norm; fused: gradients of the indexer's queries, key and head weights,
                    made in forward; unfused: these tensors themselves

    FLOPs, forward, per token: attention 2K (2k + r) a/t (unfused: all s); both absorbed products 2k (d + v) a/t; indexer's
    linears and its 2Ii scores per earlier token, on every rank; a loss, fused: the attention's scores over its keys, and the
    indexer's twice for gradients; unfused in backward again. Fused kernels reach the rate of fused attention: 640 TFLOP/s on an
    H800 (README of deepseek-ai/FlashMLA, token-level sparse prefill).

    Sources: `AbsorbedMLASelfAttention` and `DSAttention` of megatron-core 0.19, `FusedIndexerSparseAttnFunc` of its cuDNN
    kernels. Layers that share keys are priced as if each had an indexer.
    """

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
        linears = [item.name for item in self._with_role(DOWN, "query_projection")]
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
            yield from rotary_tables(shape, sizes.rope_size)
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
            inside += [table.bytes for table in rotary_tables(shape, sizes.rope_size)]
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
        yield from self._paths_back(shape, (*self._with_role(*HEADS), *reversed(self._with_role(DOWN))))

    def refusals(self, job: Job) -> Iterator[Problem]:
        if job.parallel.tensor > 1 and not job.parallel.sequence_parallel:
            yield Problem("job: parallel.sequence_parallel", "false", "true with several tensor-parallel ranks: Megatron stops")


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
