"""Recomputes in FP8 with the scales of the recorded forward, and without changing Transformer Engine's state.

Scales of delayed scaling change with every micro-batch, so frames keep a copy, and a recomputation has its own quantizers: the
live ones, their usages, amax histories and scales never change. With current scaling there is nothing to copy, but the quantizers
are still separate: a recomputation may run inside a call of the same linear.

Weights are quantized in the first micro-batch of a step and kept by the linear; a recomputation finds them there. With
`--fp8-param-gather` a parameter wraps bytes by rows, which lie in DDP's buffer, bytes by columns, and their scale. Nodes save
these; they belong to the model, and change between steps only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from megatron_lynx.runtime.saved import memory_of, parts_of, without_parts
from megatron_lynx.runtime.site import FirstPart

FORWARD = "scaling_fwd"
IS_FIRST = 4
"""Index, in the autocast state, of the flag "no FP8 module has run yet". The first one reduces amaxes in backward."""


class Fp8Autocast:
    """A `State`: whether FP8 is enabled, by which recipe and over which group. It is disabled again when backward runs."""

    def __init__(self) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        self._manager: Any = FP8GlobalStateManager

    def capture(self) -> tuple[Any, ...]:
        state = list(self._manager.get_autocast_state())
        state[IS_FIRST] = False
        return tuple(state)

    @contextmanager
    def as_captured(self, captured: tuple[Any, ...]) -> Iterator[None]:
        before = self._manager.get_autocast_state()
        self._manager.set_autocast_state(captured)
        try:
            yield
        finally:
            self._manager.set_autocast_state(before)


class Fp8Linear:
    """A `SiteState`: the quantizers of one linear, and its quantized weights."""

    def __init__(self, linear: Any) -> None:
        self._linear = linear

    def capture(self) -> Tensor | None:
        """The three scales of its forward's tensors, or None with current scaling and outside of FP8."""
        scale = getattr(self._linear.fp8_meta.get(FORWARD), "scale", None)
        return scale.detach().clone() if isinstance(scale, Tensor) else None

    @contextmanager
    def as_captured(self, captured: Tensor | None) -> Iterator[None]:
        quantizers = self._linear.quantizers
        live = quantizers[FORWARD]
        quantizers[FORWARD] = own_quantizers(live, captured)
        try:
            yield
        finally:
            quantizers[FORWARD] = live

    def lasting(self) -> Iterator[Tensor]:
        yield from memory_of(self._linear._fp8_workspaces.values())


def own_quantizers(live: Any, scale: Tensor | None) -> Any:
    """Copies of quantizers that drop their amaxes. `scale`: with delayed scaling, the recorded scales."""
    copies = [quantizer.copy() for quantizer in live]
    if scale is not None:
        amaxes = torch.zeros_like(scale)
        for quantizer, its_scale, amax in zip(copies, scale, amaxes, strict=True):
            quantizer.scale, quantizer.amax = its_scale, amax.reshape(1)
    return copies or live


def gathers_input(linear: Module) -> bool:
    return bool(linear.sequence_parallel and linear.parallel_mode == "column")


def parts_saved(linear: Any) -> int:
    """Number of tensors that a node saves of a norm's output: bytes by rows, bytes by columns, and one scale or one of each; in
    FP4 also a maximum of each."""
    quantizer = linear.quantizers[FORWARD][0]
    if quantizer.supports_only_rowwise_all_gather():
        return 3
    return 6 if hasattr(quantizer, "stochastic_rounding") else 4


def as_saved(normalised: Any, linear: Any) -> list[Tensor | None]:
    """The tensors that Transformer Engine saves. Rowwise data is kept if backward gathers it again by rows; NVFP4 keeps it
    whenever the input is gathered, without using it."""
    if not gathers_input(linear) or parts_saved(linear) == 4:
        normalised.update_usage(rowwise_usage=False)
    return list(normalised.prepare_for_saving()[0])


def as_alias(tensor: Any) -> Any:
    """An alias of an FP8 tensor: emptying it leaves the original unchanged."""
    return without_parts(tensor)({name: part.detach() for name, part in parts_of(tensor).items()})


def with_bytes(part: Any, data: Tensor) -> Any:
    """An FP8 tensor with `data` as its bytes by rows, and scale and type of `part`."""
    return type(part)(**{**part.get_metadata(), "data": data, "data_transpose": None})


SLOTS = (5, 6, 7)
"""Indices of the norm's output, mean and reciprocal deviation among the node's saved tensors (RMSNorm has no mean)."""


def norm_inside(linear: Any, item: str) -> FirstPart:
    """The norm of one `LayerNormLinear`, as the first part of its call. `item`: its name in plans."""
    from transformer_engine.pytorch.module._common import apply_normalization
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    from transformer_engine.pytorch.utils import cast_if_needed

    def slots(node: Any) -> tuple[int, ...]:
        if not node.fp8:
            return SLOTS
        return tuple(range(-2 - parts_saved(linear), 0))  # from the end: mean and deviation are the last

    def norm(hidden: Tensor) -> tuple[Tensor | None, ...]:
        dtype, quantizer = linear.activation_dtype, None
        rows = cast_if_needed(hidden.contiguous().view(-1, hidden.shape[-1]), dtype)
        weight, bias = (cast_if_needed(parameter, dtype) for parameter in (linear.layer_norm_weight, linear.layer_norm_bias))
        if FP8GlobalStateManager.is_fp8_enabled():  # set up as in the forward of the linear
            quantizer = linear.quantizers[FORWARD][0]
            quantizer.internal = True
            by_rows = gathers_input(linear) and quantizer.supports_only_rowwise_all_gather()
            quantizer.set_usage(rowwise=True, columnwise=not by_rows)
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

    return FirstPart(item=item, run=norm, node="_LayerNormLinearBackward", slots=slots)
