"""What is said while something takes long."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from megatron_lynx.cli import terminal
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.units import format_seconds


def test_what_is_over_at_once_says_nothing_and_what_is_not_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.in_progress("making the plan"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(terminal, "SECONDS_OF_A_LINE", 0.0)
    with terminal.in_progress("making the plan"):
        _wait_until(lambda: "making the plan ...\n" in capsys.readouterr().err)


def test_how_far_it_is_is_said_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal.in_progress("plans made", at_once=True) as watch:
        watch(1, 12)
        assert capsys.readouterr().err == "plans made ...\n", "one line every ten seconds"
        monkeypatch.setattr(terminal, "SECONDS_OF_A_LINE", 0.0)
        watch(2, 12)
    assert capsys.readouterr().err == "plans made: 2 of 12\n"


def test_a_bar_in_a_terminal_is_gone_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.in_progress("layouts ranked") as watch:
        watch(3, 4)
        _wait_until(lambda: "layouts ranked: 3 of 4" in stream.getvalue())
    assert stream.getvalue().rstrip().endswith("\x1b[2K"), "its line is cleared"


def _wait_until(said: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not said():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_lines_of_stderr_are_folded_to_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """They had up to 124 columns. A path is never broken; without a terminal a line is one line, for grep."""
    path = "/" + "folder/" * 15 + "plan.yaml"
    problems = [Problem("--tensor-model-parallel-size", "5 " * 30, "a divisor of 32", "--tensor-model-parallel-size 4")] * 2
    error = ConfigError("the launch cannot be read " * 4, problems)
    monkeypatch.setenv("COLUMNS", "80")
    terminal.show_error(error)
    terminal.say(f"warning: {'word ' * 30}\n  and {path}", err=True)
    folded = capsys.readouterr().err
    assert max(len(line) for line in folded.splitlines() if path not in line) <= 80
    assert path in folded
    assert sum(line.startswith("  - --tensor") for line in folded.splitlines()) == 2
    monkeypatch.delenv("COLUMNS")
    terminal.show_error(error)
    whole = capsys.readouterr().err
    assert len(whole.splitlines()) == 3
    assert folded.split()[: len(whole.split())] == whole.split()


def test_seconds_that_only_rounding_makes_are_none() -> None:
    """`bubble -3.55e-09 us` was printed."""
    assert format_seconds(-3.55e-15) == format_seconds(0.0) == "0 s"
    assert format_seconds(2e-9) == "0.002 us"


def test_a_shell_completes_names_of_clusters() -> None:
    environment = os.environ | {
        "_MEGATRON_LYNX_COMPLETE": "complete_bash",
        "COMP_WORDS": "megatron-lynx estimate --cluster h",
        "COMP_CWORD": "3",
    }
    command = [sys.executable, "-m", "megatron_lynx"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["h100-80g", "h20-96g", "h200-141g", "h800-80g", "h800-80g-400g"], done.stderr
