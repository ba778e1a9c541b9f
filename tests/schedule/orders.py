"""Orders of a stage as text, `0F0 1F0 | 2F0 0B0`, so that a test can write them out, also without flushes; and how many are in
flight."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_lynx.schedule.double_buffered import batch_order
from megatron_lynx.schedule.schedule import Action


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


@dataclass(frozen=True)
class Update:
    """The update of one batch, `U2` as text."""

    batch: int

    def __str__(self) -> str:
        return f"U{self.batch}"


def order(pipeline: int, stage: int, microbatches: int, batches: int, *, deferral: int = 0) -> tuple[Action | Update, ...]:
    """One stage's actions without flushes, from start to drain, with the updates between them."""
    steps: list[Action | Update] = []
    for batch in range(batches):
        drains = batch == batches - 1
        steps += [*batch_order(pipeline, stage, microbatches, batch, deferral=deferral, drains=drains), Update(batch)]
    return tuple(steps)


def write_actions(actions: Iterable[Action | Update]) -> str:
    return " ".join(map(str, actions))


def most_in_flight(actions: Iterable[Action]) -> int:
    """The most forwards (of one micro-batch through one chunk) whose backward is still to come."""
    count = most = 0
    for action in actions:
        count += {"F": 1, "R": 0, "B": -1}[action.kind]
        most = max(most, count)
    return most
