"""What the backward of a layer has in hand beside what the layer keeps: gradients on their way from operator to operator.

    gradient of       gathered                    of what the        of what it      scattered     of the
    the residual ──>  (sequence parallelism) ──>  GEMM was given ──> was made of ──> ...       ──> norm's input ──> + residual
        A             G                           F, Q               2F, QKV         G, A          A

    MLP          dropout, linear_fc2, activation, linear_fc1, norm
    attention    dropout, linear_proj, core attention, rotary, linear_qkv, norm

Each operator allocates the gradients of its arguments while the one it was given and what it saved are still there, then lets go
of both. That is walked through here, operator by operator; most is in hand where the balance is highest.

Every linear hands autograd a block as large as its weight's gradient. On GPUs the GEMM has added the gradient to Megatron's
buffer itself (`--gradient-accumulation-fusion`, its default), and the block, of the model's type, only makes autograd's hooks
run: Megatron's linears allocate it each time, Transformer Engine keeps one for each shape of weight (`get_dummy_wgrad`). On a CPU
it is the gradient.

Sources: `LinearWithGradAccumulationAndAsyncCommunication.backward` (what is gathered, and where to), `mha_bwd` of flash-attention
(dQ is added up in fp32; grouped keys and values get their gradients for every head first), Megatron's fused softmax (its backward
is in place). On a CPU every operator of eager PyTorch makes blocks of its own; the tests count that these are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from megatron_lynx.anatomy import ATTENTION, MLP, Section
from megatron_lynx.anatomy.dense import ACTIVATION, CORE_ATTENTION, LINEAR_FC1, LINEAR_FC2, LINEAR_PROJ, LINEAR_QKV, ROTARY
from megatron_lynx.cost.ends import added_gradient_bytes
from megatron_lynx.profiler.latent import LatentShape
from megatron_lynx.profiler.ordered_attention import ordered_bytes
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.profiler.tensors import FP32_BYTES, MASK_BYTES, activation_apart, half_tensors

EAGER_NORM_BLOCKS = 6
"""A norm made of eager operators has at most so many blocks of its input's size in fp32 in hand; torch's own has fewer."""


@dataclass(frozen=True)
class Step:
    """The backward of one operator."""

    item: str
    """Whose saved tensors are let go afterwards; empty for none."""
    made: int
    """Bytes that are allocated while it runs."""
    let_go: int
    """Of these and of the gradients made before, what is freed when it has run."""


@lru_cache(maxsize=1024)
def layer_in_hand_bytes(shape: LayerShape) -> int:
    """The most at once in a layer all of which is there when its backward begins: what the MLP half lets go of makes room.

    Remembered, as the next one is: a search asks for every stage of every pipeline that the same layers are put into.
    """
    freed = {name: size for section in shape.model.halves.values() for name, size in _freed(shape, section).items()}
    return _most(shape, [*_mlp(shape), *_attention(shape)], freed)


@lru_cache(maxsize=1024)
def half_in_hand_bytes(shape: LayerShape) -> int:
    """The same of each half by itself: where a half is made again right before its backward, nothing was let go of before."""
    attention, _ = shape.model.kind_sections(experts=False)
    return max(_most(shape, _mlp(shape), _freed(shape, MLP)), _most(shape, _attention(shape), _freed(shape, attention)))


def kept_blocks_bytes(shape: LayerShape) -> int:
    """The blocks that Transformer Engine keeps in place of the gradients of a layer's weights."""
    if not shape.model.uses_te or shape.device == "cpu":
        return 0
    hidden, element = shape.model.hidden, shape.model.element_bytes
    attention = {(shape.qkv_width, hidden), (hidden, shape.query_width)}
    if shape.model.latent is not None:
        latent = LatentShape.of(shape)
        attention = {latent.linear(item.name)[:0:-1] for item in latent.section.items if item.is_linear}
    weights = {
        *attention,
        (shape.fc1_width, hidden),
        (hidden, shape.ffn),
    }
    return sum(rows * columns for rows, columns in weights) * element


def global_buffer_bytes(shape: LayerShape) -> int:
    """Megatron's global buffer "mpu", which stays once it is there.

    Local layers gather their inputs into it. The first GEMM of unfused attention is given it as a summand that it does not read.
    """
    if shape.model.uses_te:
        return 0
    gathered = shape.gathered_input_bytes if shape.parallel.sequence_parallel and shape.parallel.tensor > 1 else 0
    scores = shape.scores * shape.model.element_bytes if shape.model.attention == "unfused" else 0
    return max(gathered, scores)


def _most(shape: LayerShape, steps: Iterable[Step], freed: dict[str, int]) -> int:
    level = most = shape.input_bytes  # the residual's gradient
    for step in steps:
        level += step.made
        most = max(most, level)
        level -= step.let_go + freed.get(step.item, 0)
    return most


def _freed(shape: LayerShape, section: Section) -> dict[str, int]:
    """Bytes that are let go of after each item's backward: those of which it is the last reader, the first one in forward."""
    freed = dict.fromkeys(section.names, 0)
    for tensor in half_tensors(shape, section.half):
        if tensor.saved_by:
            freed[min(tensor.saved_by, key=section.names.index)] += tensor.bytes
    return freed


def _mlp(shape: LayerShape) -> Iterator[Step]:
    rows = shape.tokens * shape.model.element_bytes
    ffn, made = rows * shape.ffn, rows * shape.fc1_width
    yield from _row_parallel(shape, MLP, LINEAR_FC2, ffn)
    between = made + ffn if activation_apart(shape) else 0
    yield Step(ACTIVATION, made + between, ffn + between)
    yield from _column_parallel(shape, MLP, LINEAR_FC1, made)


def _attention(shape: LayerShape) -> Iterator[Step]:
    if shape.model.latent is not None:
        yield from _latent(shape, LatentShape.of(shape))
        return
    rows = shape.tokens * shape.model.element_bytes
    query, key, whole = (rows * width for width in (shape.query_width, shape.key_width, shape.qkv_width))
    yield from _row_parallel(shape, ATTENTION, LINEAR_PROJ, query)
    yield from _core(shape, query, key)
    rotated = query + key if shape.model.position == "rope" else 0
    yield Step(ROTARY, rotated + whole, rotated + query + 2 * key)
    yield from _column_parallel(shape, ATTENTION, LINEAR_QKV, whole)


def _latent(shape: LayerShape, latent: LatentShape) -> Iterator[Step]:
    """Latent attention: keys and queries are wider than values, and there are two paths from the heads back."""
    one, sizes, residual = shape.tokens * shape.model.element_bytes, latent.sizes, shape.input_bytes
    query, value = (one * latent.heads * width for width in (sizes.query_head_size, sizes.value_head_size))
    yield from _row_parallel(shape, latent.section, LINEAR_PROJ, value)
    yield from _core(shape, query, (query + value) // 2)
    heads = [item for item in latent.section.items if item.role in ("up_projection", "query_projection")]
    made = {item.name: one * latent.linear(item.name)[2] for item in heads}
    yield Step(ROTARY, sum(made.values()), 2 * query + value)
    down = [item for item in latent.section.items if item.role == "down_projection"]
    for item in (*reversed(heads), *reversed(down)):
        rows, inside, outside = latent.linear(item.name)
        taken = rows * inside * shape.model.element_bytes
        weight = 0 if shape.model.uses_te and shape.device == "cuda" else inside * outside * added_gradient_bytes(shape)
        yield Step(item.name, taken + weight, rows * outside * shape.model.element_bytes + weight)
    temporary = EAGER_NORM_BLOCKS * residual * FP32_BYTES // shape.model.element_bytes if shape.eager else 0
    yield Step(latent.section.norm, residual + temporary, (len(down) + 1) * residual + temporary)


def _core(shape: LayerShape, query: int, key: int) -> Iterator[Step]:
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


def _row_parallel(shape: LayerShape, section: Section, linear: str, given: int) -> Iterator[Step]:
    """From the residual's gradient, which stays, to that of what the linear was given."""
    residual = shape.input_bytes
    dropped = residual if shape.model.hidden_dropout > 0 or shape.eager else 0
    yield Step(section.residual, dropped, 0)
    gathered = shape.gathered_bytes if _gathers(shape) else 0
    weight = _weight_gradient(shape, shape.model.hidden, given)
    yield Step(linear, gathered + given + weight, gathered + dropped + weight)


def _column_parallel(shape: LayerShape, section: Section, linear: str, made: int) -> Iterator[Step]:
    """From the gradient of what the linear makes to the residual's, on which both halves end."""
    residual, whole = shape.input_bytes, shape.gathered_bytes
    again = shape.gathered_input_bytes if _gathers(shape) and shape.model.uses_te else 0
    scattered = residual if _gathers(shape) else 0
    weight = _weight_gradient(shape, shape.model.hidden, made)
    yield Step(linear, again + whole + scattered + weight, again + made + weight + (whole if scattered else 0))
    temporary = EAGER_NORM_BLOCKS * residual * FP32_BYTES // shape.model.element_bytes if shape.eager else 0
    yield Step(section.norm, residual + temporary, residual + temporary)
    yield Step("", residual, 2 * residual)


def _gathers(shape: LayerShape) -> bool:
    return shape.parallel.sequence_parallel and shape.parallel.tensor > 1


def _weight_gradient(shape: LayerShape, width: int, block: int) -> int:
    """Of a linear between `width` columns and those of a block with all rows; see above."""
    if shape.model.uses_te and shape.device == "cuda":
        return 0
    return width * block // (shape.tokens * shape.model.element_bytes) * added_gradient_bytes(shape)
