"""Planning of dense attention and MLP.

Letters: s sequence, b micro-batch, h hidden, d head size, a heads, g key/value groups, t tensor-parallel size.

    linear_qkv   h  ->  (a + 2g) d / t        core_attention   two batched GEMMs, scores of all heads
    linear_proj  a d / t  ->  h
    linear_fc1   h  ->  H / t, with SwiGLU 2H / t             linear_fc2   H / t  ->  h
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.kinds.core_attention import AttentionBytes, core_tensors, kept_beside_exchange, rotary_tables
from megatron_lynx.kinds.dense.section import ACTIVATION, CORE_ATTENTION, LINEAR_FC1, LINEAR_FC2, LINEAR_PROJ, LINEAR_QKV, ROTARY
from megatron_lynx.kinds.face import HalfParameters, Linear, Planning, Step
from megatron_lynx.kinds.saved import (
    column_parallel,
    context_tensors,
    core,
    dropout_tensor,
    norm_tensors,
    rms_products,
    row_parallel,
)
from megatron_lynx.kinds.section import Item
from megatron_lynx.profiler.profile import SavedTensor, own_tensors
from megatron_lynx.profiler.roofline import Kernels, activation_kernels, one_kernel, turned_kernels
from megatron_lynx.profiler.shape import FP32_BYTES, LayerShape, saved_bytes


class DenseAttention(Planning):
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        hidden = shape.model.hidden
        return {
            LINEAR_QKV: Linear(shape.tokens, hidden, shape.qkv_width),
            LINEAR_PROJ: Linear(shape.tokens, shape.query_width, hidden),
        }

    def attention(self, shape: LayerShape) -> AttentionBytes:
        query, key = _query_key_bytes(shape)
        return AttentionBytes(query, key, key, query)

    def core_flops(self, shape: LayerShape) -> int:
        return 2 * (2 * shape.scores * shape.model.head_size)

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        """Queries and keys: copied out of the linear's block and normed, if they are, then rotated."""
        model, query_key_bytes = shape.model, sum(_query_key_bytes(shape))
        normed = one_kernel(4 * query_key_bytes, 5 * query_key_bytes) if model.qk_norm else Kernels((), ())
        if model.position != "rope":
            return normed
        query, key = (turned_kernels(shape, width, model.head_size) for width in (shape.query_width, shape.key_width))
        return normed + query + key

    def core_arguments_bytes(self, shape: LayerShape) -> int:
        """In a checkpoint eager kernels repeat grouped keys and values per head, so their originals are saved: keys, and the
        projection's block, which contains values."""
        model = shape.model
        if not shape.eager or model.kv_groups == model.heads:
            return 0
        changed = model.position == "rope" or model.qk_norm
        return shape.tokens * model.element_bytes * (shape.qkv_width + (shape.key_width if changed else 0))

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        yield from norm_tensors(shape, self.section, (LINEAR_QKV,))
        yield from queries_keys_values(shape)
        yield from core_tensors(shape)
        yield from context_tensors(shape)
        yield dropout_tensor(shape, self.section)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        matrices = model.hidden * (model.qkv_width + model.query_width)
        heads = 2 * model.norm_parameters(model.head_size) if model.qk_norm else 0  # one norm for all queries, one for all keys
        biases = model.hidden + model.qkv_width // layout.tensor if model.bias else 0
        biases += model.heads // layout.tensor if model.sinks else 0
        return HalfParameters(
            cut=matrices,
            passed=matrices,
            vectors=model.norm_parameters() + heads + biases,
            weights=2 + model.sinks,
            biased=2,
            norms=3 if model.qk_norm else 1,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        query, key = _query_key_bytes(shape)
        whole = shape.tokens * shape.model.element_bytes * shape.qkv_width
        yield from row_parallel(shape, self.section, query)
        yield from core(shape, query, key)
        rotated = query + key if shape.model.position == "rope" else 0
        yield Step(ROTARY, rotated + whole, rotated + query + 2 * key)
        yield from column_parallel(shape, self.section, whole)


class DenseMlp(Planning):
    def linears(self, shape: LayerShape) -> Mapping[str, Linear]:
        hidden = shape.model.hidden
        return {LINEAR_FC1: Linear(shape.tokens, hidden, shape.fc1_width), LINEAR_FC2: Linear(shape.tokens, shape.ffn, hidden)}

    def kernels(self, shape: LayerShape, item: Item) -> Kernels:
        return activation_kernels(shape.model, shape.tokens, shape.ffn)

    def saved(self, shape: LayerShape) -> Iterator[SavedTensor]:
        yield from norm_tensors(shape, self.section, (LINEAR_FC1,))
        yield from mlp_tensors(shape)
        yield dropout_tensor(shape, self.section)

    def parameters(self, model: Model, layout: Parallel) -> HalfParameters:
        matrices = model.hidden * (model.fc1_width + model.ffn)
        biases = model.hidden + model.fc1_width // layout.tensor if model.bias else 0
        return HalfParameters(
            cut=matrices,
            passed=matrices,
            vectors=model.norm_parameters() + biases,
            weights=2,
            biased=2,
        )

    def backward(self, shape: LayerShape) -> Iterator[Step]:
        rows = shape.tokens * shape.model.element_bytes
        ffn, made = rows * shape.ffn, rows * shape.fc1_width
        yield from row_parallel(shape, self.section, ffn)
        between = made + ffn if shape.activation_apart else 0
        if shape.eager and shape.model.activation == "gelu":  # tanh and polynomial are blocks of their own
            between += 2 * ffn
        yield Step(ACTIVATION, made + between, ffn + between)
        yield from column_parallel(shape, self.section, made)


def _query_key_bytes(shape: LayerShape) -> tuple[int, int]:
    one = shape.model.element_bytes * shape.tokens
    return one * shape.query_width, one * shape.key_width


def queries_keys_values(shape: LayerShape) -> list[SavedTensor]:
    """Return the attention's inputs: views of the projection's block, or blocks of their own if changed. With context
    parallelism fused attention saves copies even if unchanged."""
    model, exchanged = shape.model, shape.parallel.context > 1 and not shape.eager
    query, key = _query_key_bytes(shape)
    changed = model.position == "rope" or model.qk_norm
    repeated = shape.eager and model.kv_groups < model.heads  # keys and values are copied for each head
    viewed = not exchanged and (not repeated if shape.eager else not changed)
    readers = ((ROTARY,) if model.qk_norm and shape.eager else ()) + ((CORE_ATTENTION,) if viewed else ())
    whole = shape.tokens * model.element_bytes * shape.qkv_width
    blocks = [SavedTensor(bytes=whole, made_by=LINEAR_QKV, saved_by=readers, output=True)]
    if model.qk_norm:
        blocks += _query_key_norms(shape, query, key)
    turns_apart = model.position == "rope" and (shape.eager or not model.fuses("rope"))
    tables = rotary_tables(shape, model.head_size) if turns_apart else []
    if exchanged:
        given = AttentionBytes(query, key, key, query)
        return [*blocks, *tables, *kept_beside_exchange(shape.parallel, given, ROTARY if changed else CORE_ATTENTION)]
    turned = ([query] if changed or repeated else []) + ([key] if changed and not repeated else [])
    blocks += [SavedTensor(bytes=size, made_by=ROTARY, saved_by=(CORE_ATTENTION,)) for size in turned]
    if repeated:
        blocks += own_tensors(CORE_ATTENTION, query, query)  # keys and values
    blocks += tables
    if changed and not shape.eager:  # values, copied out of the block by fused kernels
        blocks.append(SavedTensor(bytes=key, made_by=ROTARY, saved_by=(CORE_ATTENTION,)))
    return blocks


def _query_key_norms(shape: LayerShape, query: int, key: int) -> list[SavedTensor]:
    """Return the tensors saved by the norms of queries and keys. Fused kernels copy their inputs out of the projection's block;
    eager ones read them there, except queries of grouped keys, which Megatron copies together."""
    model, layernorm = shape.model, shape.model.norm == "layernorm"
    one = model.element_bytes if shape.eager and layernorm else FP32_BYTES
    heads, groups = (width // model.head_size for width in (shape.query_width, shape.key_width))
    copied = [query, key] if not shape.eager else [query] if heads > groups > 1 else []
    products = [*rms_products(shape, query), *rms_products(shape, key)] if shape.eager and not layernorm else []
    statistics = [shape.tokens * count * one for count in (heads, groups)] * (2 if layernorm else 1)
    return own_tensors(ROTARY, *copied, *products, *statistics)


def mlp_tensors(shape: LayerShape) -> list[SavedTensor]:
    model, apart = shape.model, shape.sums_apart
    rows = shape.tokens * model.element_bytes
    fc1_out, ffn = rows * shape.fc1_width, rows * shape.ffn
    made = SavedTensor(bytes=fc1_out, made_by=LINEAR_FC1, saved_by=() if apart else (ACTIVATION,), output=True)
    blocks = [made, *own_tensors(ACTIVATION, fc1_out if apart else 0, *[ffn] * shape.gates_apart)]
    if model.fp8_recipe is None:
        return [*blocks, SavedTensor(bytes=ffn, made_by=ACTIVATION, saved_by=(LINEAR_FC2,))]
    return [*blocks, *own_tensors(LINEAR_FC2, saved_bytes(model.fp8_recipe, shape.tokens, shape.ffn))]
