"""Where the seconds of a step go: what a layout is told to have lost by."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Spent:
    """Where the seconds of a step go."""

    compute_s: float
    """Forwards and backwards of the slowest stage."""
    replay_s: float
    """Replays on demand there, with the collectives that they repeat."""
    communication_s: float
    """Exposed collectives of the slowest stage, messages between stages, gradients and parameters, the optimizer."""
    bubble_s: float
    copies_s: float = 0.0
    """Copies to and from the host that nothing hides."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.replay_s + self.communication_s + self.bubble_s + self.copies_s

    def up_to(self, step_s: float) -> Spent:
        """With what a step takes beyond: stages that wait for each other."""
        return replace(self, bubble_s=self.bubble_s + max(0.0, step_s - self.total_s))

    def with_update(self, update_s: float) -> Spent:
        return replace(self, communication_s=self.communication_s + update_s)
