"""What is said while something takes long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from megatron_lynx.cli import terminal


def test_what_is_over_at_once_says_nothing_and_what_is_not_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.awaited("making the plan"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "SECONDS_OF_A_LINE", 0.0)
    with terminal.awaited("making the plan"):
        _wait_until(lambda: "making the plan ...\n" in capsys.readouterr().err)


def _wait_until(said: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not said():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
