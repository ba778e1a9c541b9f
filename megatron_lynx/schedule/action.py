"""An action of a stage: a forward, replay or backward of one micro-batch and chunk, as data and as text.

    0F0 1F0 | 2F0 0R0 0B0 | 3F0 1R0 1B0 | 2R0 2B0 | 3R0 3B0          stage 0 of 3, four micro-batches
    │││
    ││└ chunk      which of the stage's model chunks (0 without interleaving)
    │└─ kind       F forward, R replay while the gradient is awaited, B backward
    └── micro-batch

The stage is not in the text: an order belongs to one stage. (torch.distributed.pipelining writes the stage first, the
micro-batch last; here a line is read as Megatron's loops run, by micro-batch.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

ActionKind = Literal["F", "R", "B"]


class Action(NamedTuple):
    """One forward, replay or backward."""

    micro_batch: int
    kind: ActionKind
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.micro_batch}{self.kind}{self.chunk}"


def with_replays(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions with a replay before each backward."""
    for action in actions:
        if action.kind == "B":
            yield Action(action.micro_batch, "R", action.chunk)
        yield action
