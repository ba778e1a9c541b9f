"""The head of the model: output projection and loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_lynx.validation import Part


class Head(Part):
    """A head in pieces, which does not equal stock's in every bit: the gradient of its weight is another sum."""

    pieces: Literal["auto"] | Annotated[int, Field(ge=2, le=1_000_000)]
    """Parts of a sequence, whose logits are there one after the other; auto: the planner decides whether, and how many."""
