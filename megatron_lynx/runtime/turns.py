"""The passes of one step as a stage runs them: what the schedule says, as data.

    1F1B, stage s of p (w = p-1-s)    F0 .. F(w-1) | F(w) B0   F(w+1) B1  ...            | B .. B
    interleaved, stage 0 of 2         0F0 1F0 0F1 1F1 | 2F0 0B1   3F0 1B1   2F1 0B0  ... | 2B1 3B1 2B0 3B0
                                       warm-up          steady: the collectives of a       cool-down: only the
                                                        forward hide replays of the        receive hides replays
                                                        backward right behind it

Megatron's schedule functions tell a backward neither its micro-batch nor its phase, and wait for a gradient before they say what
it is for. Who installs the hooks knows the schedule, and hands its orders in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

Place = tuple[int, int]
"""(micro-batch of the step, chunk of the stage)."""


class Turn(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    kind: Literal["F", "B"]
    micro_batch: int
    """Counted from 0 in each step."""
    chunk: int
    phase: Literal["warmup", "steady", "cooldown"]

    @property
    def place(self) -> Place:
        return self.micro_batch, self.chunk


class Turns:
    """All passes of one step."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.all = tuple(turns)
        self._backwards = tuple(turn for turn in turns if turn.kind == "B")
        self._at_once = {
            one.place for one, after in pairwise(turns) if (one.kind, after.kind) == ("F", "B") and one.place == after.place
        }
        self._behind = {
            one.place: after.place
            for one, after in pairwise(turns)
            if (one.kind, one.phase, after.kind) == ("F", "steady", "B") and after.place != one.place
        }

    def hidden_by(self, forward: Place) -> Place | None:
        """Whose replays the collectives of a forward hide. None where its own backward is next, or no backward is."""
        return self._behind.get(forward)

    def at_once(self, place: Place) -> bool:
        """Whether a forward's own backward is the next pass."""
        return place in self._at_once

    def backward(self, count: int) -> Turn | None:
        """The backward that runs when `count` of them have begun."""
        return self._backwards[count] if count < len(self._backwards) else None
