"""The backward of a half, operator by operator: gradients that are made and let go, in the pieces that kinds put together.

Each operator allocates the gradients of its arguments while the one it was given and what it saved are still there, then lets go
of both (`cost.in_hand` has the picture, and adds them up).

Every linear hands autograd a block as large as its weight's gradient. On GPUs the GEMM has added the gradient to Megatron's
buffer itself (`--gradient-accumulation-fusion`, its default), and the block, of the model's type, only makes autograd's hooks
run: Megatron's linears allocate it each time, Transformer Engine keeps one for each shape of weight (`get_dummy_wgrad`). On a CPU
it is the gradient.

Sources: `LinearWithGradAccumulationAndAsyncCommunication.backward` (what is gathered, and where to), `mha_bwd` of flash-attention
(dQ is added up in fp32; grouped keys and values get their gradients for every head first), Megatron's fused softmax (its backward
is in place). On a CPU every operator of eager PyTorch makes blocks of its own; the tests count that these are enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.kinds.core_attention import ordered_bytes
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
from megatron_lynx.kinds.face import Step
from megatron_lynx.kinds.section import Section
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape

EAGER_NORM_BLOCKS = 6
"""A norm made of eager operators has at most so many blocks of its input's size in fp32 in hand; torch's own has fewer."""


def core(shape: LayerShape, query: int, key: int) -> Iterator[Step]:
    """From the gradient of its result to those of queries, keys and values."""
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
        yield Step("", 3 * in_fp32, 2 * in_fp32 + scores)  # dropout, softmax, mask and scale, one after the other
        yield Step(CORE_ATTENTION, in_fp32 + 2 * query + key, 2 * in_fp32 + query - key)
        return
    dropped, mask = (scores, shape.scores * MASK_BYTES) if shape.model.attention_dropout > 0 else (0, 0)
    yield Step("", scores + key, query + dropped)  # the second GEMM; then what dropout made goes
    yield Step("", dropped, dropped + mask)
    yield Step(CORE_ATTENTION, query + key, scores - dropped - mask)  # what is gone already is among what the attention saved


def _exchanged(shape: LayerShape, query: int, key: int) -> int:
    """What context-parallel ranks send and receive in attention's backward: around a ring two buffers each way, with keys, values
    and their gradients; keys and values of all ranks and their gradients where they are gathered; the gradient of the result, and
    those of queries, keys and values, where heads are traded (`AttnFuncWithCP...` of Transformer Engine)."""
    layout = shape.parallel
    if layout.context == 1:
        return 0
    if layout.context_exchange == "all_gather":
        return 4 * layout.context * key
    traders, turns = layout.context_groups
    return (2 * query + 2 * key if traders > 1 else 0) + (8 * key if turns > 1 else 0)


def row_parallel(shape: LayerShape, section: Section, given: int) -> Iterator[Step]:
    """From the residual's gradient, which stays, to that of what the linear was given."""
    residual = shape.input_bytes
    dropped = residual if shape.model.hidden_dropout > 0 or shape.eager else 0
    yield Step(section.residual, dropped, 0)
    gathered = shape.gathered_bytes if _gathers(shape) else 0
    weight = _weight_gradient(shape, shape.model.hidden, given)
    yield Step(section.row_parallel, gathered + given + weight, gathered + dropped + weight)


def column_parallel(shape: LayerShape, section: Section, made: int) -> Iterator[Step]:
    """From the gradient of what the linear makes to the residual's, on which both halves end."""
    residual, whole = shape.input_bytes, shape.gathered_bytes
    again = shape.gathered_input_bytes if _gathers(shape) and shape.model.uses_te else 0
    scattered = residual if _gathers(shape) else 0
    weight = _weight_gradient(shape, shape.model.hidden, made)
    yield Step(section.column_parallel, again + whole + scattered + weight, again + made + weight + (whole if scattered else 0))
    yield norm(shape, section, residual)
    yield Step("", residual, 2 * residual)


def norm(shape: LayerShape, section: Section, let_go: int) -> Step:
    """Of a half's norm. `let_go`: gradients that are freed with it, of the linears that read what it made."""
    temporary = EAGER_NORM_BLOCKS * shape.input_bytes * FP32_BYTES // shape.model.element_bytes if shape.eager else 0
    return Step(section.norm, shape.input_bytes + temporary, let_go + temporary)


def _gathers(shape: LayerShape) -> bool:
    return shape.parallel.sequence_parallel and shape.parallel.tensor > 1


def _weight_gradient(shape: LayerShape, width: int, block: int) -> int:
    """Of a linear between `width` columns and those of a block with all rows; see above."""
    if shape.model.uses_te and shape.device == "cuda":
        return 0
    return width * block // (shape.tokens * shape.model.element_bytes) * shape.added_gradient_bytes
