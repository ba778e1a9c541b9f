"""What came in the micro-batches of some steps: a plan is made for full ones, and packed or changing lengths are less.

The rows of a micro-batch are its tensor's shape. Lengths of sequences that are packed into one are on the device, and so the sum
of their squares is added up there: nothing waits for it until somebody reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Met:
    """Of one rank."""

    microbatches: int = 0
    tokens: int = 0
    """Rows of the first attention half on this rank, padding included: they are computed."""
    squares: float | Tensor = 0
    """Of the lengths of whole sequences, whatever this rank has of them; a tensor where lengths are on the device."""

    def add(self, tokens: int, squares: float | Tensor) -> None:
        """One more micro-batch."""
        self.microbatches, self.tokens, self.squares = self.microbatches + 1, self.tokens + tokens, self.squares + squares

    def __add__(self, other: Met) -> Met:
        return Met(self.microbatches + other.microbatches, self.tokens + other.tokens, self.squares + other.squares)
