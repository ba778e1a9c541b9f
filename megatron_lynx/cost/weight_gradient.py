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
from megatron_lynx.anatomy.experts import EXPERTS_FC1
from megatron_lynx.cost.communication import gathered_input_bytes, latent_input_width, message_bytes_of
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.quantized import BF16_BYTES, FP8_BYTES


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
    message_bytes = message_bytes_of(profile)
    items = profile.of(section).items
    seconds = items[linear].wgrad_s or items[linear].backward_s / 2
    if section.two_paths and linear != section.row_parallel:
        input_bytes, made_bytes = _latent_operands_bytes(profile, section, linear, message_bytes)
    elif linear == section.column_parallel:
        input_bytes, made_bytes = gathered_input_bytes(profile, message_bytes), _output_bytes(profile, section, linear)
    elif section.of_name[linear].role == "experts_in":
        input_bytes, made_bytes = _argument_bytes(profile, section, linear), _output_bytes(profile, section, linear)
    elif section.of_name[linear].role == "experts_out":  # gives back as many rows as experts got
        input_bytes, made_bytes = _argument_bytes(profile, section, linear), _argument_bytes(profile, section, EXPERTS_FC1)
    else:
        input_bytes, made_bytes = _argument_bytes(profile, section, linear), message_bytes
    by_rows_and_columns = 1 if profile.shape.fp8 is None else BF16_BYTES // FP8_BYTES
    return WeightGradient(seconds, by_rows_and_columns * input_bytes, made_bytes)


def _latent_operands_bytes(profile: Profile, section: Section, linear: str, message_bytes: int) -> tuple[int, int]:
    """What a linear of latent attention was given, and what it made: Transformer Engine's down-projections on the rank's own
    rows, Megatron's a part of the columns. Two that read the same input are taken to
    hold it each by itself, although it is there once."""
    down, te = section.of_name[linear].role == "down_projection", profile.shape.implementation == "transformer_engine"
    made_bytes = _output_bytes(profile, section, linear) // (profile.shape.tensor if down and not te else 1)
    if down and te:
        return profile.half(section.half).input_bytes, made_bytes
    return message_bytes * latent_input_width(profile, linear) // profile.shape.hidden, made_bytes


def _argument_bytes(profile: Profile, section: Section, linear: str) -> int:
    """What the linear keeps of its input, by the profile; in FP8 that is the cast one. What latent attention gathered stays as
    long, for others."""
    stays = {item.name for item in section.items if item.role == "down_projection"}
    tensors = (tensor for tensor in profile.of(section).tensors if tensor.made_by not in stays)
    return sum(tensor.bytes for tensor in tensors if linear in tensor.saved_by)


def _output_bytes(profile: Profile, section: Section, linear: str) -> int:
    half = profile.of(section)
    made = (tensor.bytes for tensor in half.tensors if tensor.made_by == linear and tensor.output)
    return next(made, half.items[linear].output_bytes)
