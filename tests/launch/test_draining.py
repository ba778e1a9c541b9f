"""Behind which batches the pipeline is empty, by Megatron's arguments: wherever its loop evaluates, saves, skips or stops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lynx.launch.schedule import Draining, must_drain

NOTHING = {
    "train_iters": 10,
    "do_valid": True,
    "eval_interval": None,
    "save": "somewhere",
    "save_interval": None,
    "non_persistent_save_interval": None,
    "exit_interval": None,
    "phase_transition_iterations": None,
    "iterations_to_skip": [],
}


def drained(**given: Any) -> list[int]:
    return [number for number in range(1, 11) if must_drain(SimpleNamespace(**NOTHING | given), number)]


@pytest.mark.parametrize(
    ("given", "batches"),
    [
        ({}, [10]),
        ({"eval_interval": 4}, [4, 8, 10]),
        ({"eval_interval": 4, "do_valid": False}, [10]),
        ({"save_interval": 3, "non_persistent_save_interval": 7}, [3, 6, 7, 9, 10]),
        ({"save_interval": 3, "save": None}, [10]),
        ({"exit_interval": 6, "phase_transition_iterations": [5]}, [5, 6, 10]),
        ({"iterations_to_skip": [5]}, [4, 5, 10]),
    ],
    ids=str,
)
def test_known_when_the_batch_begins(given, batches):
    assert drained(**given) == batches


def test_a_stop_is_for_the_next_batch_and_nothing_is_saved_before() -> None:
    args, seen, saves = SimpleNamespace(**NOTHING, curr_iteration=0), [], []

    def decided(stops: bool) -> bool:
        saves.append(args.save)
        return stops

    draining = Draining(args)
    for stops in (False, True, False):
        seen.append(draining.now())
        draining.look(lambda stops=stops: decided(stops))  # type: ignore[misc]
    assert [*seen, draining.now()] == [False, False, True, True]
    assert saves == [None] * 3
    assert args.save == "somewhere"
