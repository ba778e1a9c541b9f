"""Saved tensors and backward operators shared by several kinds of halves, for three implementations:

    unfused, cpu    Megatron's local layer in eager PyTorch: every operator saves for itself. Scores of the whole s x s square, in
                    fp32 if the model's type is smaller; dropout saves its noise, an element each; RMSNorm its product; SwiGLU
                    three blocks; grouped keys and values are repeated for each head.
    flash           fused kernels: the parts of Korthikanti et al. (2205.05198) without the 5as/h of the scores, attention 11,
                    MLP 19, norms 4 per sbh at two bytes an element. SwiGLU saves its input, 6H/h with its output; unfused, SiLU
                    and the other half are blocks of their own, 10H/h (8H/h in Yuan et al., ATC '24, whose fork had no offset).
                    In FP8, linears save bytes of their inputs instead, from their own casts (`profiler.shape`).
    unfused, cuda   the same kernels except attention, with its 5as/h: softmax's output 2, dropout's mask 1 and output 2.

Every linear returns to autograd a block as large as its weight's gradient, of the model's type: Megatron's linears allocate it
each time, Transformer Engine keeps one per weight shape (`get_dummy_wgrad`). On a CPU it is the gradient.

Sources: `LinearWithGradAccumulationAndAsyncCommunication.backward` (gathers), `mha_bwd` of flash-attention (dQ accumulates in
fp32; grouped keys and values get per-head gradients first), Megatron's fused softmax (in-place backward).
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.kinds.core_attention import ordered_bytes
from megatron_lynx.kinds.dense.section import CORE_ATTENTION, LINEAR_PROJ
from megatron_lynx.kinds.face import Step
from megatron_lynx.kinds.section import Section
from megatron_lynx.profiler.profile import SavedTensor, own_tensors
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape, normed_bytes, saved_bytes


def context_tensors(shape: LayerShape) -> list[SavedTensor]:
    """Return the attention's output. Fused kernels read it in backward, so with current scaling `linear_proj` saves the same
    tensor instead of FP8 bytes (Megatron's `set_save_original_input`); with delayed scaling it cannot."""
    model = shape.model
    query = shape.tokens * model.element_bytes * shape.query_width
    if model.fp8_recipe != "delayed":
        return [SavedTensor(bytes=query, made_by=CORE_ATTENTION, saved_by=(LINEAR_PROJ,), output=True)]
    readers = (CORE_ATTENTION,) if model.attention == "flash" else ()
    made = SavedTensor(bytes=query, made_by=CORE_ATTENTION, saved_by=readers, output=True)
    return [made, *own_tensors(LINEAR_PROJ, saved_bytes("delayed", shape.tokens, shape.query_width))]


def norm_tensors(shape: LayerShape, section: Section, readers: tuple[str, ...]) -> list[SavedTensor]:
    """Return the output of a half's norm, read by `readers`, and its statistics. Inside a Transformer Engine linear it is no
    site: its output has no memo."""
    model, norm, output = shape.model, section.norm, shape.input_bytes
    inside = model.uses_te and section.fuses_norm
    if inside and model.fp8_recipe is not None:
        gathered = shape.parallel.sequence_parallel
        output = normed_bytes(model.fp8_recipe, shape.own_tokens, model.hidden, gathered=gathered)
    return [*statistics(shape, norm, output), SavedTensor(bytes=output, made_by=norm, saved_by=readers, output=not inside)]


def statistics(shape: LayerShape, norm: str, output_bytes: int) -> list[SavedTensor]:
    """Return the tensors saved by a norm besides its output of `output_bytes`."""
    return own_tensors(norm, *norm_blocks(shape, shape.own_tokens, output_bytes))


def norm_blocks(shape: LayerShape, rows: int, output_bytes: int) -> list[int]:
    """Return the bytes of its blocks: one statistic per row or, with LayerNorm, two, and the products of eager operators."""
    model, layernorm = shape.model, shape.model.norm == "layernorm"
    one = FP32_BYTES if model.uses_te or (shape.eager and not layernorm) else model.element_bytes
    products = rms_products(shape, output_bytes) if shape.eager and not layernorm else []
    return [rows * one] * (1 + layernorm) + products


def rms_products(shape: LayerShape, size: int) -> list[int]:
    """Return the blocks saved by an eager RMSNorm of an input of `size` bytes: its fp32 product before the weight, which is for
    the weight's gradient, and in 16 bits its fp32 copy."""
    element, trained = shape.model.element_bytes, shape.model.adapters is None
    return [size // element * FP32_BYTES] * (trained + (element < FP32_BYTES))


def dropout_tensor(shape: LayerShape, section: Section) -> SavedTensor:
    size = shape.model.element_bytes if shape.eager else MASK_BYTES
    count = shape.own_tokens * shape.model.hidden if shape.model.hidden_dropout > 0 else 0
    return SavedTensor(bytes=count * size, made_by=section.residual, saved_by=(section.residual,))


EAGER_NORM_BLOCKS = 6
"""Upper bound on a norm of eager operators, in fp32 blocks of its input's size; torch's own needs fewer."""


def core(shape: LayerShape, query: int, key: int) -> Iterator[Step]:
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
    """Return the buffers of context parallelism in attention's backward (`AttnFuncWithCP...` of Transformer Engine)."""
    layout = shape.parallel
    if layout.context == 1:
        return 0
    if layout.context_exchange == "all_gather":
        return 4 * layout.context * key
    traders, turns = layout.context_groups
    return (2 * query + 2 * key if traders > 1 else 0) + (8 * key if turns > 1 else 0)


def row_parallel(shape: LayerShape, section: Section, given: int) -> Iterator[Step]:
    residual = shape.input_bytes
    dropped = residual if shape.model.hidden_dropout > 0 or shape.eager else 0
    yield Step(section.residual, dropped, 0)
    gathered = shape.gathered_bytes if shape.parallel.sequence_parallel else 0
    weight = _weight_gradient(shape, section.row_parallel, shape.model.hidden, given)
    yield Step(section.row_parallel, gathered + given + weight, gathered + dropped + weight)


def column_parallel(shape: LayerShape, section: Section, made: int) -> Iterator[Step]:
    residual, whole = shape.input_bytes, shape.gathered_bytes
    again = shape.gathered_input_bytes if shape.parallel.sequence_parallel and shape.model.uses_te else 0
    scattered = residual if shape.parallel.sequence_parallel else 0
    weight = _weight_gradient(shape, section.column_parallel, shape.model.hidden, made)
    yield Step(section.column_parallel, again + whole + scattered + weight, again + made + weight + (whole if scattered else 0))
    yield norm(shape, section, residual)
    yield Step("", residual, 2 * residual)


def norm(shape: LayerShape, section: Section, let_go: int) -> Step:
    """Backward of a half's norm. `let_go`: gradients of the linears that read its output, freed with it."""
    temporary = EAGER_NORM_BLOCKS * shape.input_bytes * FP32_BYTES // shape.model.element_bytes if shape.eager else 0
    return Step(section.norm, shape.input_bytes + temporary, let_go + temporary)


def _weight_gradient(shape: LayerShape, linear: str, width: int, block: int) -> int:
    """Return the weight gradient of a linear between `width` columns and those of a block with all rows. Beside a frozen weight:
    an adapter's scaled gradient and its input's gradient, at most both."""
    if shape.model.adapters is not None:
        return block + shape.gathered_bytes if linear in shape.model.adapted else 0
    if shape.keeps_gradient_blocks:
        return 0
    return width * block // (shape.tokens * shape.model.element_bytes) * shape.added_gradient_bytes
