"""What one half of a layer holds of one micro-batch under a stock setting."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class HalfBytes:
    """Bytes, the half's input included."""

    stays: int
    """On the device from forward to backward."""
    again: int = 0
    """Made again when its backward begins."""
    leaves: int = 0
    """In host memory from forward to backward."""
    copied: int = 0
    """What goes to the host, and comes back: more than `leaves` where somebody else holds on to it, or two modules copy it."""
    input_leaves: int = 0
    """The part of `leaves` that is the half's input. The schedule holds on to what a stage has received."""

    @property
    def received(self) -> HalfBytes:
        """The same where another stage has sent the input."""
        return replace(self, stays=self.stays + self.input_leaves, leaves=self.leaves - self.input_leaves, input_leaves=0)

    @property
    def kept_whole(self) -> HalfBytes:
        """The same where nothing of it is offloaded after all."""
        return HalfBytes(self.stays + self.leaves, self.again)
