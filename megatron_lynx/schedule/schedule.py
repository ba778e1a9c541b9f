"""The orders of all stages of a pipeline, and the phase of each action.

stage 0 of 3     F  F | F B  F B  F B | B  B          micro-batch i of chunk c is at virtual stage c * p + s:
stage 1          F | F B  F B  F B  F B | B           its forward comes from the virtual stage before,
stage 2          F B  F B  F B  F B  F B              its backward from the one after
                 warm-up │ steady      │ cool-down

An action as text, without its stage:

    0F0 1F0 | 2F0 0R0 0B0 | 3F0 1R0 1B0 | 2R0 2B0 | 3R0 3B0          stage 0 of 3, four micro-batches
    │││
    ││└ chunk      model chunk of the stage (0 without interleaving)
    │└─ kind       F forward, R recomputation while the gradient is awaited, B backward,
    │               W weight gradients once the input's gradient is sent
    └── micro-batch
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ActionKind = Literal["F", "R", "B", "W"]

VirtualMicroBatch = tuple[int, int]
"""As in Megatron: (micro-batch of the step, chunk of the stage)."""


class Action(NamedTuple):
    micro_batch: int
    kind: ActionKind
    chunk: int = 0

    @property
    def virtual(self) -> VirtualMicroBatch:
        return self.micro_batch, self.chunk

    @property
    def is_pass(self) -> bool:
        """Whether it is a forward or a backward, not work during a message."""
        return self.kind in ("F", "B")

    def __str__(self) -> str:
        return f"{self.micro_batch}{self.kind}{self.chunk}"


Phase = Literal["warmup", "steady", "cooldown"]


@dataclass(frozen=True)
class Schedule:
    orders: tuple[tuple[Action, ...], ...]
    """By stage."""
    warmups: tuple[int, ...]
    """By stage, forwards before its first pair of a forward and a backward, given enough micro-batches."""
    chunks: int = 1
    blocking: bool = True
    """Whether sends are blocking: in Megatron's 1F1B, not in its interleaved schedule with `overlap_p2p_comm`."""

    @property
    def pipeline(self) -> int:
        return len(self.orders)

    def phases(self, stage: int) -> Iterator[tuple[Action, Phase]]:
        """A forward is steady if its collectives may hide recomputations of the backward that follows. A backward has the phase
        of the forward before it, and is in cool-down after another backward."""
        return phases_of(self.orders[stage], self.warmups[stage])


def phases_of(order: Sequence[Action], warmup: int, in_flight: int = 0) -> Iterator[tuple[Action, Phase]]:
    """`warmup`: forwards before the first pair. `in_flight`: at the start."""
    phase: Phase = "cooldown"
    for action in order:
        if action.kind == "F":
            phase = "steady" if 0 < warmup <= in_flight else "warmup"
            in_flight += 1
        yield action, phase
        if action.kind == "B":
            phase = "cooldown"
            in_flight -= 1


def paired(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> tuple[Action, ...]:
    """Return the first `ahead` forwards, then pairs of a forward and a backward, then the remaining backwards."""
    pairs = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return (*forwards[:ahead], *pairs, *backwards[len(pairs) // 2 :])
