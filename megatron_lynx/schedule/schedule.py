"""The orders of all stages of a pipeline, and in which phase each action is.

stage 0 of 3     F  F | F B  F B  F B | B  B          micro-batch i of chunk c is at virtual stage c * p + s:
stage 1          F | F B  F B  F B  F B | B           its forward comes from the virtual stage before,
stage 2          F B  F B  F B  F B  F B              its backward from the one behind
                 warm-up │ steady      │ cool-down

An action of a stage: a forward, replay or backward of one micro-batch and chunk, as data and as text.

    0F0 1F0 | 2F0 0R0 0B0 | 3F0 1R0 1B0 | 2R0 2B0 | 3R0 3B0          stage 0 of 3, four micro-batches
    │││
    ││└ chunk      which of the stage's model chunks (0 without interleaving)
    │└─ kind       F forward, R replay while the gradient is awaited, B backward
    └── micro-batch

The stage is not in the text: an order belongs to one stage. (torch.distributed.pipelining writes the stage first, the
micro-batch last; here a line is read as Megatron's loops run, by micro-batch.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ActionKind = Literal["F", "R", "B"]

VirtualMicroBatch = tuple[int, int]
"""As in Megatron: (micro-batch of the step, chunk of the stage)."""


class Action(NamedTuple):
    """One forward, replay or backward."""

    micro_batch: int
    kind: ActionKind
    chunk: int = 0

    @property
    def virtual(self) -> VirtualMicroBatch:
        """The virtual micro-batch that it is a pass of."""
        return self.micro_batch, self.chunk

    def __str__(self) -> str:
        return f"{self.micro_batch}{self.kind}{self.chunk}"


def with_replays(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions with a replay before each backward."""
    for action in actions:
        if action.kind == "B":
            yield Action(action.micro_batch, "R", action.chunk)
        yield action


Phase = Literal["warmup", "steady", "cooldown"]


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule, as `one_f_one_b` and `interleaved` return it."""

    orders: tuple[tuple[Action, ...], ...]
    """The actions of each stage."""
    warmups: tuple[int, ...]
    """Forwards that each stage runs before its first pair of a forward and a backward, if there are so many."""
    chunks: int = 1
    """Model chunks of each stage."""
    blocking: bool = True
    """Whether a stage waits until what it sends has arrived: Megatron's 1F1B does, its interleaved schedule with
    `overlap_p2p_comm` does not."""

    @property
    def pipeline(self) -> int:
        return len(self.orders)

    def phases(self, stage: int) -> Iterator[tuple[Action, Phase]]:
        """The actions of a stage with their phases, as the runtime's ledger tells them.

        A forward is steady when its collectives may hide replays of the micro-batch whose backward comes right behind it.
        A backward has the phase of the forward right before it, and is in cool-down where another backward is.
        """
        return phases_of(self.orders[stage], self.warmups[stage])


def phases_of(order: Sequence[Action], warmup: int) -> Iterator[tuple[Action, Phase]]:
    """The actions of one stage with their phases. `warmup`: its forwards before the first pair."""
    in_flight = 0
    phase: Phase = "cooldown"
    for action in order:
        if action.kind == "F":
            phase = "steady" if 0 < warmup <= in_flight else "warmup"
            in_flight += 1
        yield action, phase
        if action.kind == "B":
            phase = "cooldown"
            in_flight -= 1
