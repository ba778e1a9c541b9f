"""Runs the norm inside a Transformer Engine linear, without the linear.

    hidden states ──> norm ──> GEMM ──> output            `LayerNormLinear`: one module, one node of autograd
         └ saved        └ saved: output, mean, deviation

The norm's saved tensors are recomputed without the GEMM and without a gather: the same kernel is called on the same input, as
the module calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_lynx.apply.transformer_engine.fp8 import as_saved, in_fp8, input_quantizer_of, parts_saved
from megatron_lynx.runtime.site import FirstPart

NODE = "_LayerNormLinearBackward"
"""The autograd node of a `LayerNormLinear`, in every known release."""
SLOTS = (5, 6, 7)
"""Indices of the norm's output, mean and reciprocal deviation among the node's saved tensors (RMSNorm has no mean)."""


def norm_inside(linear: Any, item: str) -> FirstPart:
    """The norm of one `LayerNormLinear`, as the first part of its call. `item`: its name in plans."""

    def slots(node: Any) -> tuple[int, ...]:
        if not node.fp8:
            return SLOTS
        return tuple(range(-2 - parts_saved(linear), 0))  # from the end: mean and deviation are the last

    return FirstPart(item=item, run=_norm_of(linear), node=NODE, slots=slots)


def _norm_of(linear: Any) -> Callable[[Tensor], tuple[Tensor | None, ...]]:
    from transformer_engine.pytorch.module._common import apply_normalization
    from transformer_engine.pytorch.utils import cast_if_needed

    def norm(hidden: Tensor) -> tuple[Tensor | None, ...]:
        dtype = linear.activation_dtype
        rows = cast_if_needed(hidden.contiguous().view(-1, hidden.shape[-1]), dtype)
        weight, bias = (cast_if_needed(each, dtype) for each in (linear.layer_norm_weight, linear.layer_norm_bias))
        quantizer = input_quantizer_of(linear) if in_fp8() else None
        normalised, mean, deviation = apply_normalization(
            rows,
            None,  # into a new tensor
            weight,
            bias,
            linear.eps,
            quantizer,
            rows.dtype,
            linear.normalization,
            linear.fwd_ln_sm_margin,
            linear.zero_centered_gamma,
        )
        parts = [normalised] if quantizer is None else as_saved(normalised, linear)
        return (*parts, mean, deviation)

    return norm
