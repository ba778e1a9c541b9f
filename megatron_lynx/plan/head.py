"""What a plan says of the head: the output projection and the loss, in the model's last chunk."""

from __future__ import annotations

from pydantic import Field

from megatron_lynx.validation import Part


class Head(Part):
    """A head in pieces."""

    pieces: int = Field(ge=2, le=1_000_000)
    """Parts of a sequence, one after the other: logits, loss and gradients of one are there at a time. The weight's gradient is
    then summed in another order than stock's, and is not equal to it in every bit."""
