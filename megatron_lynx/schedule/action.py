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

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

ActionKind = Literal["F", "R", "B"]


class Action(NamedTuple):
    """One forward, replay or backward. Its text parses back: `read_action(str(action)) == action`."""

    micro_batch: int
    kind: ActionKind
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.micro_batch}{self.kind}{self.chunk}"


def read_action(text: str) -> Action:
    """The action that `text` names: `2F0`. ValueError where it names none."""
    match = re.fullmatch(r"(0|[1-9]\d*)([FRB])(0|[1-9]\d*)", text, re.ASCII)
    if match is None:
        raise ValueError(f"{text!r} is no action: needed micro-batch, F, R or B, and chunk, like 2F0")
    micro_batch, kind, chunk = match.groups()
    return Action(int(micro_batch), kind, int(chunk))  # type: ignore[arg-type]


def read_actions(text: str) -> tuple[Action, ...]:
    """The actions of one stage, separated by spaces; `|` may set off phases."""
    return tuple(read_action(word) for word in text.split() if word != "|")


def write_actions(actions: Iterable[Action]) -> str:
    return " ".join(map(str, actions))


def with_replays(actions: Iterable[Action]) -> Iterator[Action]:
    """The actions with a replay before each backward."""
    for action in actions:
        if action.kind == "B":
            yield Action(action.micro_batch, "R", action.chunk)
        yield action


def most_in_flight(actions: Sequence[Action]) -> int:
    """The most forwards (of one micro-batch through one chunk) whose backward is still to come."""
    count = most = 0
    for action in actions:
        count += {"F": 1, "R": 0, "B": -1}[action.kind]
        most = max(most, count)
    return most
