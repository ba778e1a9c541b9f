"""Calls in a second process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megatron_lynx.advise.beside import beside

SCRIPT = """
import os
print("the script runs")
from megatron_lynx.advise.beside import beside
with beside(os.getpid) as result:
    print("elsewhere" if result() != os.getpid() else "here")
"""


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """The second process does not import the user's `__main__`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    here = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, script], env=os.environ | {"PYTHONPATH": here}, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["the script runs", "elsewhere" if len(os.sched_getaffinity(0)) > 1 else "here"]


def test_results_come_in_the_order_of_calls() -> None:
    with beside(partial(int, "7"), partial(str, 8)) as result:
        assert [result(), result()] == [7, "8"]


def test_on_one_core_it_is_called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with beside(os.getpid) as result:
        assert result() == os.getpid()


def test_an_error_in_the_second_process_is_raised_here() -> None:
    with beside(partial(int, "seven")) as result, pytest.raises(ValueError, match="seven"):
        result()


def test_a_process_that_nobody_waits_for_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def noting(*args: object, **kwargs: object) -> subprocess.Popen[bytes]:
        started.append(original(*args, **kwargs))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(subprocess, "Popen", noting)
    with pytest.raises(KeyboardInterrupt), beside(partial(time.sleep, 600)):
        raise KeyboardInterrupt
    assert [process.poll() for process in started] == [-9]
