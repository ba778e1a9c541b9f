"""How many micro-batches are on the host at once: for the planner from a layout, for a run from the order of its passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megatron_lynx.schedule.flushes import most_on_host, sets_on_host, with_flushes
from megatron_lynx.schedule.schedule import Action, Phase


def counted(passes: Sequence[tuple[Action, Phase]], chunk: int) -> int:
    """The same by the words: at each pass, those whose forward is over and whose reload has not been asked for."""
    order = [action for action, _ in passes]
    backwards = [action for action in order if action.kind == "B"]

    def asked_for(action: Action) -> int:
        """The pass before which it comes back, or none."""
        for at, (one, phase) in enumerate(passes):
            begun = sum(other.kind == "B" for other in order[: at + 1])
            hides = one.kind == "F" and phase == "steady" and order[at + 1] == backwards[begun] and order[at + 1][::2] != one[::2]
            if one == action or ((one.kind == "B" or hides) and action in backwards[begun : begun + 1]):
                return at
        raise AssertionError(f"{action} never comes")

    gone = [
        (at, asked_for(Action(one.micro_batch, "B", one.chunk)))
        for at, one in enumerate(order)
        if one.kind == "F" and one.chunk == chunk and order[at + 1] != Action(one.micro_batch, "B", one.chunk)
    ]
    return max((sum(left <= at < back for left, back in gone) for at in range(len(order))), default=0)


@pytest.mark.parametrize(
    ("pipeline", "microbatches", "chunks", "group"),
    [(1, 4, 1, None), (2, 4, 1, None), (8, 32, 1, None), (8, 3, 1, None), (2, 4, 2, None), (4, 8, 3, None), (2, 7, 2, 5)],
)
def test_sets_of_the_pool(pipeline: int, microbatches: int, chunks: int, group: int | None) -> None:
    schedule = with_flushes(pipeline, microbatches, chunks, group)
    for stage in range(pipeline):
        passes = list(schedule.phases(stage))
        expected = tuple(counted(passes, chunk) for chunk in range(chunks))
        assert sets_on_host(pipeline, stage, microbatches, chunks, group) == expected


def test_stages_of_1f1b() -> None:
    assert [sets_on_host(8, stage, 32) for stage in range(8)] == [(7 - stage,) for stage in range(8)]


@pytest.mark.parametrize(
    ("warmup", "microbatches", "sets"),
    [(0, 8, 0), (1, 8, 1), (3, 8, 3), (3, 2, 2), (7, 8, 7)],
)
def test_micro_batches_on_the_host_at_once(warmup: int, microbatches: int, sets: int) -> None:
    warmup = min(warmup, microbatches)
    passes: list[Any] = [(Action(i, "F"), "warmup") for i in range(warmup)]
    for i in range(warmup, microbatches):
        passes += [(Action(i, "F"), "steady"), (Action(i - warmup, "B"), "steady")]
    passes += [(Action(i, "B"), "cooldown") for i in range(microbatches - warmup, microbatches)]
    assert most_on_host(passes)[0] == sets
