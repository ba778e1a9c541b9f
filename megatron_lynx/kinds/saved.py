"""Tensors saved by halves of several kinds: norm, attention output, dropout.

Three implementations, by `model.attention` and device:

    unfused, cpu    Megatron's local layer in eager PyTorch: every operator saves for itself. Scores of the whole s x s square, in
                    fp32 if the model's type is smaller; dropout saves its noise, an element each; RMSNorm its product; SwiGLU
                    three blocks; grouped keys and values are repeated for each head.
    flash           fused kernels: the parts of Korthikanti et al. (2205.05198) without the 5as/h of the scores, attention 11,
                    MLP 19, norms 4 per sbh at two bytes an element. SwiGLU saves its input, 6H/h with its output; unfused, SiLU
                    and the other half are blocks of their own, 10H/h (8H/h in Yuan et al., ATC '24, whose fork had no offset).
                    In FP8, linears save bytes of their inputs instead, from their own casts (`profiler.quantized`).
    unfused, cuda   the same kernels except attention, with its 5as/h: softmax's output 2, dropout's mask 1 and output 2.
"""

from __future__ import annotations

from megatron_lynx.kinds.dense.section import CORE_ATTENTION, LINEAR_PROJ
from megatron_lynx.kinds.section import Section
from megatron_lynx.profiler.profile import SavedTensor
from megatron_lynx.profiler.quantized import normed_bytes, saved_bytes
from megatron_lynx.profiler.shape import FP32_BYTES, MASK_BYTES, LayerShape


def context_tensors(shape: LayerShape) -> list[SavedTensor]:
    """Return the attention's output. Fused kernels read it in backward, so with current scaling `linear_proj` saves the same
    tensor instead of FP8 bytes (Megatron's `set_save_original_input`); with delayed scaling it cannot.
    """
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
    """Return the output of a half's norm, read by `readers`, and its statistics. Inside a Transformer Engine linear it is no
    site: its output has no memo.
    """
    model, norm, output = shape.model, section.norm, shape.input_bytes
    inside = model.uses_te and section.fuses_norm
    if inside and model.fp8_recipe is not None:
        gathered = shape.parallel.sequence_parallel
        output = normed_bytes(model.fp8_recipe, shape.own_tokens, model.hidden, gathered=gathered)
    return [*statistics(shape, norm, output), SavedTensor(bytes=output, made_by=norm, saved_by=readers, output=not inside)]


def statistics(shape: LayerShape, norm: str, output_bytes: int) -> list[SavedTensor]:
    """Return the tensors saved by a norm besides its output of `output_bytes`."""
    model, own = shape.model, {"made_by": norm, "saved_by": (norm,)}
    layernorm = model.norm == "layernorm"
    one = FP32_BYTES if model.uses_te or (shape.eager and not layernorm) else model.element_bytes
    products = rms_products(shape, output_bytes) if shape.eager and not layernorm else []
    return [SavedTensor(bytes=size, **own) for size in (*[shape.own_tokens * one] * (1 + layernorm), *products)]


def rms_products(shape: LayerShape, size: int) -> list[int]:
    """Return the blocks saved by an eager RMSNorm of an input of `size` bytes: its fp32 product before the weight, and in 16 bits
    its fp32 copy. The input counts as saved, too, though backward does not read it.
    """
    model = shape.model
    whole = size // model.element_bytes * FP32_BYTES
    return [whole] if model.element_bytes == FP32_BYTES else [whole, whole]


def dropout_tensor(shape: LayerShape, section: Section) -> SavedTensor:
    size = shape.model.element_bytes if shape.eager else MASK_BYTES
    count = shape.own_tokens * shape.model.hidden if shape.model.hidden_dropout > 0 else 0
    return SavedTensor(bytes=count * size, made_by=section.residual, saved_by=(section.residual,))
