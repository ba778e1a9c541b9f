"""Every memory block that the backward of one layer reads, by the layer's shape.

Three implementations, as `model.attention` and the device say:

    unfused, cpu    Megatron's local layer in eager PyTorch: every operator saves for itself. The scores of the whole
                    s x s square, in fp32 where the model is not; dropout saves its noise, an element each; RMSNorm its
                    product; SwiGLU three blocks; grouped keys and values are repeated for each head.
    flash           fused kernels: the parts of Korthikanti et al. (2205.05198) without the 5as/h of the scores, attention 11,
                    MLP 19, norms 4 per sbh at two bytes an element. SwiGLU saves what it is given, 6H/h with what it makes;
                    where it is not fused SiLU and the other half are blocks of their own, 10H/h (8H/h in Yuan et al.,
                    ATC '24, whose fork added no offset).
                    In FP8, linears keep bytes of their inputs instead, which they made themselves (`profiler.quantized`).
    unfused, cuda   the same kernels but for the attention, with its 5as/h: softmax's result 2, its dropout's mask 1 and result 2.
"""

from __future__ import annotations

from megatron_lynx.anatomy import ATTENTION, MLP, Half, Section
from megatron_lynx.anatomy.dense import ACTIVATION, CORE_ATTENTION, LINEAR_FC1, LINEAR_FC2, LINEAR_PROJ, LINEAR_QKV, ROTARY
from megatron_lynx.profiler.element_wise import FP32_BYTES as FP32_BYTES
from megatron_lynx.profiler.element_wise import MASK_BYTES as MASK_BYTES
from megatron_lynx.profiler.exchanged import AttentionBytes, kept_beside_exchange
from megatron_lynx.profiler.latent import LatentShape
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.quantized import saved_bytes
from megatron_lynx.profiler.shape import LayerShape


def half_tensors(shape: LayerShape, half: Half) -> tuple[SavedTensor, ...]:
    """The memory blocks of one half, beside its input."""
    blocks = {ATTENTION.half: _attention, MLP.half: _mlp}[half](shape)
    return tuple(block for block in blocks if block.bytes)


def _attention(shape: LayerShape) -> list[SavedTensor]:
    if shape.model.latent is not None:
        return [*LatentShape.of(shape).tensors(), *_core(shape), *_context(shape), _dropout(shape, ATTENTION)]
    return [*_norm(shape, ATTENTION), *_queries_keys_values(shape), *_core(shape), *_context(shape), _dropout(shape, ATTENTION)]


def _context(shape: LayerShape) -> list[SavedTensor]:
    """What the attention hands on. Fused kernels read it in backward as well, so with current scales `linear_proj` keeps it as it
    is, instead of its bytes in FP8 (Megatron's `set_save_original_input`); with delayed ones it cannot."""
    model = shape.model
    query = shape.tokens * model.element_bytes * shape.query_width
    if model.fp8_recipe != "delayed":
        return [SavedTensor(bytes=query, made_by=CORE_ATTENTION, saved_by=(LINEAR_PROJ,), output=True)]
    readers = (CORE_ATTENTION,) if model.attention == "flash" else ()
    size = saved_bytes("delayed", shape.tokens, shape.query_width)
    return [
        SavedTensor(bytes=query, made_by=CORE_ATTENTION, saved_by=readers, output=True),
        SavedTensor(bytes=size, made_by=LINEAR_PROJ, saved_by=(LINEAR_PROJ,)),
    ]


def _queries_keys_values(shape: LayerShape) -> list[SavedTensor]:
    """What the attention reads: views of the projection's one block, or blocks of their own where something changed them."""
    model, element = shape.model, shape.model.element_bytes
    query, key, whole = (shape.tokens * element * width for width in (shape.query_width, shape.key_width, shape.qkv_width))
    rotary = model.position == "rope"
    changed = rotary or model.qk_norm
    repeated = shape.eager and model.kv_groups < model.heads  # each head gets its own copy of keys and values
    if shape.parallel.context > 1 and not shape.eager:
        return _exchanged(shape, whole, query, key)
    viewed = not repeated if shape.eager else not changed
    handed_on = {"made_by": ROTARY, "saved_by": (CORE_ATTENTION,)}
    readers = ((ROTARY,) if model.qk_norm and shape.eager else ()) + ((CORE_ATTENTION,) if viewed else ())
    blocks = [SavedTensor(bytes=whole, made_by=LINEAR_QKV, saved_by=readers, output=True)]
    if model.qk_norm:
        blocks += _query_key_norms(shape, query, key)
    if changed or repeated:
        blocks.append(SavedTensor(bytes=query, **handed_on))
    if changed and not repeated:
        blocks.append(SavedTensor(bytes=key, **handed_on))
    if repeated:
        blocks += [SavedTensor(bytes=query, made_by=CORE_ATTENTION, saved_by=(CORE_ATTENTION,)) for _ in ("keys", "values")]
    if rotary:
        blocks += _turning_tables(shape)
    if changed and not shape.eager:
        blocks.append(SavedTensor(bytes=key, **handed_on))  # values, which fused kernels take out of the block
    return blocks


def _exchanged(shape: LayerShape, whole: int, query: int, key: int) -> list[SavedTensor]:
    """What fused attention keeps of queries, keys and values where context-parallel ranks exchange them. Fused kernels take what
    nothing changed out of the projection's block, as a copy."""
    model = shape.model
    blocks = [SavedTensor(bytes=whole, made_by=LINEAR_QKV, saved_by=(), output=True)]
    if model.qk_norm:
        blocks += _query_key_norms(shape, query, key)
    handed_on = ROTARY if model.position == "rope" or model.qk_norm else CORE_ATTENTION
    if model.position == "rope":
        blocks += _turning_tables(shape)
    return [*blocks, *kept_beside_exchange(shape.parallel, AttentionBytes(query, key, key, query), handed_on)]


def _turning_tables(shape: LayerShape) -> list[SavedTensor]:
    """Sine and cosine, for queries and for keys, where no kernel of its own turns them."""
    if shape.model.fuses("rope") and not shape.eager:
        return []
    table = shape.model.seq // shape.parallel.context * shape.model.head_size * shape.model.element_bytes
    return [SavedTensor(bytes=table, made_by=ROTARY, saved_by=(ROTARY,)) for _ in range(4)]


def _query_key_norms(shape: LayerShape, query: int, key: int) -> list[SavedTensor]:
    """What the norms of queries and keys keep, of that many bytes: code between `linear_qkv` and the attention, as `rotary` is.

    Fused kernels copy what they norm out of the projection's block. Eager ones read it there, but for queries that share their
    keys, which Megatron copies to put them side by side; RMSNorm keeps its product as well.
    """
    model, own = shape.model, {"made_by": ROTARY, "saved_by": (ROTARY,)}
    layernorm = model.norm == "layernorm"
    one = model.element_bytes if shape.eager and layernorm else FP32_BYTES
    heads, groups = (width // model.head_size for width in (shape.query_width, shape.key_width))
    copied = [query, key] if not shape.eager else [query] if heads > groups > 1 else []
    products = [*_rms_products(shape, query), *_rms_products(shape, key)] if shape.eager and not layernorm else []
    statistics = [shape.tokens * count * one for count in (heads, groups)] * (2 if layernorm else 1)
    return [SavedTensor(bytes=size, **own) for size in (*copied, *products, *statistics)]


def _core(shape: LayerShape) -> list[SavedTensor]:
    """What the attention itself keeps, beside queries, keys and values."""
    own = {"made_by": CORE_ATTENTION, "saved_by": (CORE_ATTENTION,)}
    element, dropout = shape.model.element_bytes, shape.model.attention_dropout > 0
    if shape.model.attention == "flash":
        return [SavedTensor(bytes=FP32_BYTES * shape.scores // shape.model.seq, **own)]  # log-sum-exp of each row
    if not shape.eager:
        return [SavedTensor(bytes=shape.scores * size, **own) for size in (element, *((MASK_BYTES, element) if dropout else ()))]
    sizes = [FP32_BYTES]  # what softmax made
    if element != FP32_BYTES and not dropout:
        sizes.append(element)  # its copy in the model's type, which the second GEMM reads
    if dropout:
        sizes += [element, element]  # the noise, and their product
    causal_mask = SavedTensor(bytes=shape.model.seq**2, **own)  # a boolean each, made anew by every layer
    return [causal_mask, *(SavedTensor(bytes=shape.scores * size, **own) for size in sizes)]


def _mlp(shape: LayerShape) -> list[SavedTensor]:
    model = shape.model
    rows = shape.tokens * model.element_bytes
    own = {"made_by": ACTIVATION, "saved_by": (ACTIVATION,)}
    fc1_out, ffn = rows * shape.fc1_width, rows * shape.ffn
    apart = sums_apart(shape)
    blocks = [
        *_norm(shape, MLP),
        SavedTensor(bytes=fc1_out, made_by=LINEAR_FC1, saved_by=() if apart else (ACTIVATION,), output=True),
        SavedTensor(bytes=fc1_out if apart else 0, **own),
    ]
    blocks += [SavedTensor(bytes=ffn, **own) for _ in range(gates_apart(shape))]
    if model.fp8_recipe is None:
        blocks.append(SavedTensor(bytes=ffn, made_by=ACTIVATION, saved_by=(LINEAR_FC2,)))
    else:
        size = saved_bytes(model.fp8_recipe, shape.tokens, shape.ffn)
        blocks.append(SavedTensor(bytes=size, made_by=LINEAR_FC2, saved_by=(LINEAR_FC2,)))
    return [*blocks, _dropout(shape, MLP)]


def activation_apart(shape: LayerShape) -> bool:
    """Whether every operator of the activation saves for itself."""
    return shape.eager or not shape.model.fuses_activation


def sums_apart(shape: LayerShape) -> bool:
    """Whether the sum with the bias is a block of its own that is saved in place of what the GEMM made; or what ReLU made is."""
    squared = shape.eager and shape.model.activation == "squared_relu"
    return activation_apart(shape) and (shape.model.bias or squared)


def gates_apart(shape: LayerShape) -> int:
    """Blocks that SwiGLU saves beside what it is given: SiLU of one half, and the other half plus Megatron's offset of 0."""
    if shape.model.activation != "swiglu" or not activation_apart(shape):
        return 0
    return 1 + shape.model.glu_offset


def _eager_norm_bytes(shape: LayerShape) -> int:
    """Of one number that RMSNorm keeps of a row: made of single operators, it counts in fp32."""
    return FP32_BYTES if shape.eager else shape.model.element_bytes


def _rms_products(shape: LayerShape, size: int) -> list[int]:
    """What RMSNorm of single operators keeps of an input of so many bytes: its product before the weight, in fp32, and in 16 bits
    the fp32 copy that this is made of. Then nothing of the norm reads its input, which counts as kept all the same."""
    model = shape.model
    whole = size // model.element_bytes * FP32_BYTES
    return [whole] if model.element_bytes == FP32_BYTES else [whole, whole]


def _norm(shape: LayerShape, section: Section) -> list[SavedTensor]:
    """The norm's output, and per row what it needs to go back. Transformer Engine's is no site: nothing remembers its output."""
    model, rows, norm, linear = shape.model, shape.own_tokens, section.norm, section.column_parallel
    out = shape.input_bytes
    layernorm = model.norm == "layernorm"
    if model.uses_te:
        statistics = [SavedTensor(bytes=rows * FP32_BYTES, made_by=norm, saved_by=(norm,)) for _ in range(1 + layernorm)]
        out = out if model.fp8_recipe is None else saved_bytes(model.fp8_recipe, rows, model.hidden)
        return [*statistics, SavedTensor(bytes=out, made_by=norm, saved_by=(linear,))]
    one = model.element_bytes if layernorm else _eager_norm_bytes(shape)
    blocks = [SavedTensor(bytes=rows * one, made_by=norm, saved_by=(norm,)) for _ in range(2 if layernorm else 1)]
    if shape.eager and not layernorm:
        blocks += [SavedTensor(bytes=size, made_by=norm, saved_by=(norm,)) for size in _rms_products(shape, out)]
    return [*blocks, SavedTensor(bytes=out, made_by=norm, saved_by=(linear,), output=True)]


def _dropout(shape: LayerShape, section: Section) -> SavedTensor:
    size = shape.model.element_bytes if shape.eager else MASK_BYTES
    count = shape.own_tokens * shape.model.hidden if shape.model.hidden_dropout > 0 else 0
    return SavedTensor(bytes=count * size, made_by=section.residual, saved_by=(section.residual,))


def embedding_bytes(shape: LayerShape) -> int:
    """What the embedding keeps of one micro-batch: its dropout's mask."""
    size = shape.model.element_bytes if shape.eager else MASK_BYTES
    return size * shape.own_tokens * shape.model.hidden if shape.model.hidden_dropout else 0


def head_bytes(shape: LayerShape) -> int:
    """What the final norm and the output projection read: each its input."""
    return 2 * shape.input_bytes


def logits_bytes(shape: LayerShape) -> int:
    """What the loss keeps, in fp32."""
    return FP32_BYTES * shape.tokens * shape.model.vocab // shape.parallel.tensor
