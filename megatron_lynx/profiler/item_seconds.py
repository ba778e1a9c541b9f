"""Seconds of the items of a layer, by its shape and a device's roofline.

    FLOPs of each item   `shape.item_flops`   forward once, backward twice; fused attention's backward 2.5 times (it makes the
                                              scores again), and a causal mask halves both
    bytes of each item   `_kernels`           what its kernels read and write, each tensor once (`element_wise`)

Context-parallel ranks exchange keys and values inside the core attention: `context_exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.anatomy import Item
from megatron_lynx.anatomy.dense import CORE_ATTENTION, LINEAR_FC1, LINEAR_FC2, LINEAR_PROJ, LINEAR_QKV, ROTARY
from megatron_lynx.profiler.context_exchange import exchanging_s
from megatron_lynx.profiler.element_wise import (
    Kernels,
    activation_kernels,
    one_kernel,
    residual_kernels,
    softmax_kernels,
    turned_kernels,
)
from megatron_lynx.profiler.latent import LatentShape
from megatron_lynx.profiler.ordered_attention import ordered_s
from megatron_lynx.profiler.profile import ItemProfile
from megatron_lynx.profiler.quantized import FP8_BYTES
from megatron_lynx.profiler.roofline import Passes, Roofline
from megatron_lynx.profiler.shape import LayerShape, item_flops
from megatron_lynx.profiler.tensors import FP32_BYTES, MASK_BYTES

FUSED_BACKWARD = 2.5
"""GEMMs of fused attention's backward over those of its forward: five and two."""


def item_profile(shape: LayerShape, item: Item, roof: Roofline) -> ItemProfile:
    """One item of a layer. What it saves is counted elsewhere (`profiler.tensors`)."""
    flops = flops_of(shape)[item.name]
    if item.is_linear:
        return _linear(shape, item, flops, roof)
    if item.role == "core":
        seconds = exchanging_s(_attention_s(shape, flops, roof), shape, roof)
    else:
        seconds = unmultiplied_s(shape, item, roof)
        if roof.casts is not None and item.role == "norm":
            both = not shape.parallel.sequence_parallel
            cast_s = roof.cast_s(roof.casts.of_norm(shape.own_tokens * shape.model.hidden, both=both))
            seconds = seconds + Passes(cast_s, 0.0)
    return ItemProfile(
        forward_s=seconds.forward_s, backward_s=seconds.backward_s, saved_bytes=0, output_bytes=_output(shape, item), flops=flops
    )


def flops_of(shape: LayerShape) -> dict[str, int]:
    """FLOPs of every item of a layer, whatever fills its attention half."""
    latent = {} if shape.model.latent is None else LatentShape.of(shape).flops()
    return item_flops(shape) | latent


def unmultiplied_s(shape: LayerShape, item: Item, roof: Roofline) -> Passes:
    """An item without a GEMM, whose kernels read and write; nothing where there are none."""
    return kernels_s(_kernels(shape, item), roof)


def kernels_s(kernels: Kernels, roof: Roofline) -> Passes:
    """Seconds of kernels that compute next to nothing, one after the other."""
    forward_s, backward_s = (sum(roof.seconds(0, moved) for moved in each) for each in kernels)
    return Passes(forward_s, backward_s)


def _linear(shape: LayerShape, item: Item, flops: int, roof: Roofline) -> ItemProfile:
    """The weight's gradient is added to an fp32 buffer: read and written."""
    size = LinearShape.of(shape, item)
    element, read, weight = shape.model.element_bytes, size.read_bytes, size.inside * size.outside
    taken, made = size.rows * size.inside, size.rows * size.outside
    forward_s = roof.linear_s(flops, read * (taken + weight) + element * made)
    dgrad_s = roof.linear_s(flops, read * (made + weight) + element * taken)
    wgrad_s = roof.linear_s(flops, read * (taken + made) + 2 * FP32_BYTES * weight)
    if item.role in ("column_parallel", "up_projection", "query_projection"):
        dgrad_s, wgrad_s = (roof.slowed_s(*both) for both in zip((dgrad_s, wgrad_s), roof.beside_s, strict=True))
    cast_forward_s, cast_backward_s = _casts_s(shape, item, size, roof)
    return ItemProfile(
        forward_s=forward_s + cast_forward_s,
        backward_s=dgrad_s + wgrad_s + cast_backward_s,
        saved_bytes=0,
        output_bytes=_output(shape, item),
        flops=flops,
        dgrad_s=dgrad_s,
        wgrad_s=wgrad_s,
    )


@dataclass(frozen=True)
class LinearShape:
    """A linear of one rank: its rows, columns of what it takes and of what it makes, and in how many bytes its GEMMs read."""

    rows: int
    inside: int
    outside: int
    read_bytes: int

    @classmethod
    def of(cls, shape: LayerShape, item: Item) -> LinearShape:
        hidden = shape.model.hidden
        if shape.model.latent is not None and item in LatentShape.of(shape).section.items:
            return cls(*LatentShape.of(shape).linear(item.name), shape.model.element_bytes)
        inside, outside = {
            LINEAR_QKV: (hidden, shape.qkv_width),
            LINEAR_PROJ: (shape.query_width, hidden),
            LINEAR_FC1: (hidden, shape.fc1_width),
            LINEAR_FC2: (shape.ffn, hidden),
        }[item.name]
        return cls(shape.tokens, inside, outside, shape.model.element_bytes if shape.model.fp8 is None else FP8_BYTES)


def _casts_s(shape: LayerShape, item: Item, size: LinearShape, roof: Roofline) -> tuple[float, float]:
    """Forward and backward seconds of a linear's casts: of its input, where no norm makes it, and of its output's gradient.

    Under sequence parallelism what is gathered is gathered in FP8, and by columns only afterwards.
    """
    casts, sliced = roof.casts, shape.parallel.sequence_parallel
    if casts is None:
        return 0.0, 0.0
    taken, made = shape.tokens * size.inside, shape.tokens * size.outside
    if item.role == "column_parallel":
        gathered_s = roof.cast_s(casts.transposed(taken)) if sliced else 0.0
        return 0.0, roof.cast_s(casts.of(made, both=True)) + gathered_s
    gradient_s = roof.cast_s(casts.of(shape.own_tokens * size.outside, both=not sliced))
    return roof.cast_s(casts.of(taken, both=True)), gradient_s + (roof.cast_s(casts.transposed(made)) if sliced else 0.0)


def _attention_s(shape: LayerShape, flops: int, roof: Roofline) -> Passes:
    """Unfused: two batched GEMMs, a head of a sequence each, and softmax with its mask and dropout pass over all scores."""
    element = shape.model.element_bytes
    read = element * shape.tokens * 2 * (shape.query_width + shape.key_width)
    if shape.model.latent is not None:
        read = sum(LatentShape.of(shape).attention_bytes())
    if shape.model.attention == "flash":
        causal = flops / 2
        kernel = shape.model.attention_kernel
        free = Passes(roof.attention_s(causal, read, kernel), roof.attention_s(FUSED_BACKWARD * causal, 2 * read, kernel))
        return ordered_s(free, shape, roof)
    scores, heads = element * shape.scores, shape.micro * shape.model.heads // shape.parallel.tensor
    gemms_s = 2 * roof.batched_s(heads, flops / 2, read / 2 + scores)
    dropout = 2 * scores + MASK_BYTES * shape.scores if shape.model.attention_dropout else 0
    dropout_s = roof.seconds(0, dropout) if dropout else 0.0
    softmax = kernels_s(softmax_kernels(shape), roof)
    return Passes(gemms_s + dropout_s, 2 * gemms_s + dropout_s) + softmax


def _kernels(shape: LayerShape, item: Item) -> Kernels:
    """What an item without a GEMM runs."""
    residual = shape.model.element_bytes * shape.own_tokens * shape.model.hidden
    if item.role == "norm":
        return one_kernel(2 * residual, 3 * residual)
    if item.role == "residual":
        return residual_kernels(shape)
    if shape.model.latent is not None and (item.role == "inner_norm" or item.name == ROTARY):
        return LatentShape.of(shape).kernels(item)
    if item.name == ROTARY:
        return _rotary(shape)
    return activation_kernels(shape.model, shape.tokens, shape.ffn)


def _rotary(shape: LayerShape) -> Kernels:
    """Queries and keys, copied out of the linear's block and normed, if they are, and turned."""
    model, widths = shape.model, (shape.query_width, shape.key_width)
    both = model.element_bytes * shape.tokens * sum(widths)
    normed = one_kernel(4 * both, 5 * both) if model.qk_norm else Kernels((), ())
    if model.position != "rope":
        return normed
    query, key = (turned_kernels(shape, width, model.head_size) for width in widths)
    return normed + query + key


def _output(shape: LayerShape, item: Item) -> int:
    if not item.is_site:
        return 0
    if shape.model.latent is not None and item.role in ("down_projection", "up_projection", "query_projection"):
        rows, _, outside = LatentShape.of(shape).linear(item.name)
        return rows * outside * shape.model.element_bytes
    if item.role == "inner_norm":
        latent = LatentShape.of(shape)
        return latent.latent_rows * latent.rank_of(item) * shape.model.element_bytes
    widths = {LINEAR_QKV: shape.qkv_width, CORE_ATTENTION: shape.query_width, LINEAR_FC1: shape.fc1_width}
    return shape.tokens * widths[item.name] * shape.model.element_bytes if item.name in widths else shape.input_bytes
