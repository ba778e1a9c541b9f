"""Memory blocks that halves of several kinds save: of the norm before it, of what it was given, of dropout.

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

from megatron_lynx.kinds.dense.section import CORE_ATTENTION, LINEAR_PROJ
from megatron_lynx.kinds.section import Section
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.quantized import normed_bytes, saved_bytes
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape


def context_tensors(shape: LayerShape) -> list[SavedTensor]:
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


def norm_tensors(shape: LayerShape, section: Section, readers: tuple[str, ...]) -> list[SavedTensor]:
    """The output of a half's norm, which these items read, and per row what it needs to go back. Where Transformer Engine makes
    it inside a linear it is no site: nothing remembers its output."""
    model, norm, output = shape.model, section.norm, shape.input_bytes
    inside = model.uses_te and section.fuses_norm
    if inside and model.fp8_recipe is not None:
        gathered = shape.parallel.sequence_parallel
        output = normed_bytes(model.fp8_recipe, shape.own_tokens, model.hidden, gathered=gathered)
    return [*statistics(shape, norm, output), SavedTensor(bytes=output, made_by=norm, saved_by=readers, output=not inside)]


def statistics(shape: LayerShape, norm: str, output_bytes: int) -> list[SavedTensor]:
    """What a norm keeps that makes so many bytes of a rank's own rows, beside these."""
    model, own = shape.model, {"made_by": norm, "saved_by": (norm,)}
    layernorm = model.norm == "layernorm"
    one = FP32_BYTES if model.uses_te or (shape.eager and not layernorm) else model.element_bytes
    products = rms_products(shape, output_bytes) if shape.eager and not layernorm else []
    return [SavedTensor(bytes=size, **own) for size in (*[shape.own_tokens * one] * (1 + layernorm), *products)]


def rms_products(shape: LayerShape, size: int) -> list[int]:
    """What RMSNorm of single operators keeps of an input of so many bytes: its product before the weight, in fp32, and in 16 bits
    the fp32 copy that this is made of. Then nothing of the norm reads its input, which counts as kept all the same."""
    model = shape.model
    whole = size // model.element_bytes * FP32_BYTES
    return [whole] if model.element_bytes == FP32_BYTES else [whole, whole]


def dropout_tensor(shape: LayerShape, section: Section) -> SavedTensor:
    size = shape.model.element_bytes if shape.eager else MASK_BYTES
    count = shape.own_tokens * shape.model.hidden if shape.model.hidden_dropout > 0 else 0
    return SavedTensor(bytes=count * size, made_by=section.residual, saved_by=(section.residual,))
