"""Delayed weight gradients of linears: seconds and bytes.

    backward of a linear     dgrad ─> the gradient is passed on     at once
                             wgrad                                  later, in a wait; its two operands stay until then
                               └── total input (gathered, with sequence parallelism)  x  gradient of the output (all rows)

Each GEMM is half of the backward's FLOPs; profiles have both, measured or estimated. Both operands count in full. In FP8
Transformer Engine may keep a tensor by rows and by columns, a byte each: as many bytes as in bf16. Experts of a rank count
together, under the assumed load.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.anatomy import Section
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.quantized import BF16_BYTES, cast_bytes


class WeightGradient(NamedTuple):
    """One linear's, for one micro-batch."""

    seconds: float
    input_bytes: int
    """Its input, all rows."""
    gradient_bytes: int
    """Gradient of its output, all rows."""

    @property
    def bytes(self) -> int:
        return self.input_bytes + self.gradient_bytes


def weight_gradient(profile: Profile, section: Section, linear: str) -> WeightGradient:
    item = profile.of(section).items[linear]
    input_bytes, gradient_bytes = planning_of(section).operands_bytes(profile, linear)
    if (recipe := profile.shape.fp8) is not None:
        input_bytes, gradient_bytes = 2 * input_bytes, 2 * cast_bytes(recipe, gradient_bytes // BF16_BYTES)
    return WeightGradient(item.wgrad_s or item.backward_s / 2, input_bytes, gradient_bytes)
