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
    "exit_signal_handler": False,
    "exit_duration_in_mins": None,
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


def test_a_signal_is_for_the_next_batch():
    received = [[False, False], [False, True], [False, False]]
    training = SimpleNamespace(get_signal_handler=lambda: SimpleNamespace(signals_received=lambda: received.pop(0)))
    args = SimpleNamespace(**NOTHING | {"exit_signal_handler": True}, curr_iteration=0)
    draining, seen = Draining(args, training), []
    for args.curr_iteration in range(3):
        seen.append(draining.now())
        draining.look()
    assert [*seen, draining.now()] == [False, False, True, True]


def test_time_that_is_over_is_for_the_next_batch(monkeypatch):
    """Beside a handler of signals, too, that has received none."""
    training = SimpleNamespace(get_signal_handler=lambda: SimpleNamespace(signals_received=lambda: [False]))
    draining = Draining(SimpleNamespace(**NOTHING | {"exit_signal_handler": True}, curr_iteration=0), training)
    seen = []
    for over in (False, True):
        monkeypatch.setattr(draining, "_out_of_time", lambda over=over: over)
        draining.look()
        seen.append(draining.now())
    assert seen == [False, True]
