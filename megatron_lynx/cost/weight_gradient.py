"""What the gradient of a linear's weight takes and holds, where it is put off: a filler of waits that depends on no other rank.

    backward of a linear     dgrad ─> the gradient goes on          at once
                             wgrad                                  later, in a wait: until then its two operands are held
                               └── total input (gathered, with sequence parallelism)  x  gradient of the output (all rows)

Each of the two is half of the backward's GEMMs: as many FLOPs, and a profile has the seconds of both, measured or not. Nothing
else holds the operands when the half of the linear is over: both count whole. In FP8 Transformer Engine may keep a tensor by rows
and by columns, a byte each: as many bytes as in bf16. Of experts all of a rank count together, under the load that is assumed.
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
    """What the linear was given, on all rows."""
    gradient_bytes: int
    """The gradient of what it put out, on all rows."""

    @property
    def bytes(self) -> int:
        """What is held while it is put off."""
        return self.input_bytes + self.gradient_bytes


def weight_gradient(profile: Profile, section: Section, linear: str) -> WeightGradient:
    """The weight gradient of one of a section's linears."""
    item = profile.of(section).items[linear]
    input_bytes, gradient_bytes = planning_of(section).operands_bytes(profile, linear)
    if (recipe := profile.shape.fp8) is not None:
        input_bytes, gradient_bytes = 2 * input_bytes, 2 * cast_bytes(recipe, gradient_bytes // BF16_BYTES)
    return WeightGradient(item.wgrad_s or item.backward_s / 2, input_bytes, gradient_bytes)
