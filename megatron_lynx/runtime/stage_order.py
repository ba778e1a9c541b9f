"""In which order a stage runs its passes: what the pipeline schedule says, as data.

Megatron's schedule functions tell a backward neither its micro-batch nor its phase, and wait for a gradient before they say what
it is for. Whoever installs the hooks knows the schedule and hands its order in.

    1F1B, stage s of p (w = p-1-s)    F0 .. F(w-1) | F(w) B0   F(w+1) B1  ...            | B .. B
    interleaved, stage 0 of 2         0F0 1F0 0F1 1F1 | 2F0 0B1   3F0 1B1   2F1 0B0  ... | 2B1 3B1 2B0 3B0
                                       warm-up          steady: the collectives of a       cool-down: only the
                                                        forward hide replays of the        receive hides replays
                                                        backward right behind it
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

VirtualMicroBatch = tuple[int, int]
"""What Megatron calls so: (micro-batch of the step, chunk of the stage)."""


class ScheduledPass(NamedTuple):
    """One pass of one micro-batch through one chunk."""

    kind: Literal["F", "B"]
    micro_batch: int
    """Counted from 0 in each step."""
    chunk: int
    phase: Literal["warmup", "steady", "cooldown"]

    @property
    def virtual(self) -> VirtualMicroBatch:
        """The virtual micro-batch that it is a pass of."""
        return self.micro_batch, self.chunk


class StageOrder:
    """All passes that a stage runs in one step, in order."""

    def __init__(
        self,
        passes: Sequence[ScheduledPass],
        completing: Container[VirtualMicroBatch] | None = None,
        *,
        in_turns: bool = False,
    ) -> None:
        """`completing`: backwards right behind which gradients may be read; by default the last one of each chunk. `in_turns`:
        of one chunk, whose backwards run beside the next micro-batch's forward, layer by layer: each begins when its own forward
        is over."""
        self.all, self.in_turns = tuple(passes), in_turns
        self._backwards = tuple(one for one in passes if one.kind == "B")
        self._completing = {one.chunk: one.virtual for one in self._backwards}.values() if completing is None else completing
        forward_first = [(one, after) for one, after in pairwise(passes) if (one.kind, after.kind) == ("F", "B")]
        at_once = passes if in_turns else [one for one, after in forward_first if one.virtual == after.virtual]
        self._at_once = {one.virtual for one in at_once}
        self._behind = {
            one.virtual: after.virtual for one, after in forward_first if one.phase == "steady" and one.virtual != after.virtual
        }

    def hidden_by(self, forward: VirtualMicroBatch) -> VirtualMicroBatch | None:
        """The micro-batch whose replays a forward's collectives hide. None where its own backward is next, or no backward is."""
        return self._behind.get(forward)

    def at_once(self, micro_batch: VirtualMicroBatch) -> bool:
        """Whether a forward's own backward begins when that is over."""
        return micro_batch in self._at_once

    def completes_gradients(self, micro_batch: VirtualMicroBatch) -> bool:
        """Whether gradients may be read right behind a backward: it is the last one that adds to them."""
        return micro_batch in self._completing

    def backward(self, count: int) -> ScheduledPass | None:
        """The backward that runs when `count` of them have begun."""
        return self._backwards[count] if count < len(self._backwards) else None


OrderOfStep = Callable[[int], StageOrder]
"""From the number of micro-batches of a step to the order in which this stage runs their passes."""
