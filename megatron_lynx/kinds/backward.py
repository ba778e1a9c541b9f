"""Backward of a half, operator by operator: gradients allocated and freed.

Each operator allocates its inputs' gradients while its output's gradient and its saved tensors are live, then frees both (drawn
and summed in `cost.in_hand`).

Every linear returns to autograd a block as large as its weight's gradient. On GPUs the GEMM has already added the gradient to
Megatron's buffer (`--gradient-accumulation-fusion`, default), and the block, of the model's type, only triggers autograd's hooks:
Megatron's linears allocate it each time, Transformer Engine keeps one per weight shape (`get_dummy_wgrad`). On a CPU it is the
gradient.

Sources: `LinearWithGradAccumulationAndAsyncCommunication.backward` (gathers), `mha_bwd` of flash-attention (dQ accumulates in
fp32; grouped keys and values get per-head gradients first), Megatron's fused softmax (in-place backward). Eager PyTorch on a CPU
allocates a block per operator; tests check that these are enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.kinds.core_attention import ordered_bytes
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
from megatron_lynx.kinds.face import Step
from megatron_lynx.kinds.section import Section
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape

EAGER_NORM_BLOCKS = 6
"""Upper bound on a norm of eager operators, in fp32 blocks of its input's size; torch's own needs fewer."""


def core(shape: LayerShape, query: int, key: int) -> Iterator[Step]:
    """Core attention, from its output's gradient to those of queries, keys and values."""
    grouped = shape.model.kv_groups < shape.model.heads
    if shape.model.attention == "flash":
        added_up = query * FP32_BYTES // shape.model.element_bytes if shape.model.element_bytes < FP32_BYTES else 0
        each_head = 2 * query if grouped else 0
        beside = added_up + each_head + _exchanged(shape, query, key) + ordered_bytes(shape)
        yield Step(CORE_ATTENTION, query + 2 * key + beside, query + beside)
        return
    scores = shape.scores * shape.model.element_bytes
    if shape.eager:
        in_fp32 = shape.scores * FP32_BYTES
        yield Step("", scores + query, query)  # the second GEMM
        yield Step("", 3 * in_fp32, 2 * in_fp32 + scores)  # dropout, softmax, mask and scale, in turn
        yield Step(CORE_ATTENTION, in_fp32 + 2 * query + key, 2 * in_fp32 + query - key)
        return
    dropped, mask = (scores, shape.scores * MASK_BYTES) if shape.model.attention_dropout > 0 else (0, 0)
    yield Step("", scores + key, query + dropped)  # the second GEMM; then dropout's output is freed
    yield Step("", dropped, dropped + mask)
    yield Step(CORE_ATTENTION, query + key, scores - dropped - mask)  # less the saved tensors already freed


def _exchanged(shape: LayerShape, query: int, key: int) -> int:
    """Return the buffers of context parallelism in attention's backward (`AttnFuncWithCP...` of Transformer Engine).

    p2p: two buffers each way, with keys, values and their gradients. all_gather: keys and values of all ranks, and their
    gradients. a2a: gradients of the output, queries, keys and values.
    """
    layout = shape.parallel
    if layout.context == 1:
        return 0
    if layout.context_exchange == "all_gather":
        return 4 * layout.context * key
    traders, turns = layout.context_groups
    return (2 * query + 2 * key if traders > 1 else 0) + (8 * key if turns > 1 else 0)


def row_parallel(shape: LayerShape, section: Section, given: int) -> Iterator[Step]:
    """From the residual's gradient, which stays, to that of the linear's input."""
    residual = shape.input_bytes
    dropped = residual if shape.model.hidden_dropout > 0 or shape.eager else 0
    yield Step(section.residual, dropped, 0)
    gathered = shape.gathered_bytes if _gathers(shape) else 0
    weight = _weight_gradient(shape, shape.model.hidden, given)
    yield Step(section.row_parallel, gathered + given + weight, gathered + dropped + weight)


def column_parallel(shape: LayerShape, section: Section, made: int) -> Iterator[Step]:
    """From the gradient of the linear's output to the residual's, the end of both halves."""
    residual, whole = shape.input_bytes, shape.gathered_bytes
    again = shape.gathered_input_bytes if _gathers(shape) and shape.model.uses_te else 0
    scattered = residual if _gathers(shape) else 0
    weight = _weight_gradient(shape, shape.model.hidden, made)
    yield Step(section.column_parallel, again + whole + scattered + weight, again + made + weight + (whole if scattered else 0))
    yield norm(shape, section, residual)
    yield Step("", residual, 2 * residual)


def norm(shape: LayerShape, section: Section, let_go: int) -> Step:
    """Backward of a half's norm. `let_go`: gradients of the linears that read its output, freed with it."""
    temporary = EAGER_NORM_BLOCKS * shape.input_bytes * FP32_BYTES // shape.model.element_bytes if shape.eager else 0
    return Step(section.norm, shape.input_bytes + temporary, let_go + temporary)


def _gathers(shape: LayerShape) -> bool:
    return shape.parallel.sequence_parallel and shape.parallel.tensor > 1


def _weight_gradient(shape: LayerShape, width: int, block: int) -> int:
    """Return the weight gradient of a linear between `width` columns and those of a block with all rows."""
    if shape.model.uses_te and shape.device == "cuda":
        return 0
    return width * block // (shape.tokens * shape.model.element_bytes) * shape.added_gradient_bytes
