"""What is said while something takes long."""

from __future__ import annotations

import io
import sys

import pytest

from megatron_lynx.cli import terminal
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.units import format_seconds


def test_what_takes_long_is_named_and_progress_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.in_progress("plans made") as watch:
        watch(1, 12)
    assert capsys.readouterr().err == ""
    with terminal.announced("reading megatron-core"):
        assert capsys.readouterr().err == "reading megatron-core ...\n"


def test_a_bar_in_a_terminal_is_gone_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with terminal.in_progress("layouts ranked") as watch:
        watch(3, 4)
    assert "layouts ranked: 3 of 4" in stream.getvalue()
    assert stream.getvalue().rstrip().endswith("\x1b[2K"), "its line is cleared"


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
