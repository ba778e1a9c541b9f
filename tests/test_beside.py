"""Calls in other processes: same results in the same order, errors included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_lynx.beside import PROCESSES, beside, results
from megatron_lynx.errors import Infeasible, Problem

PROBLEM = Problem("stage 0", "2 GiB", "at most 1 GiB")


def slow(number: int) -> tuple[int, int]:
    time.sleep(0.2)
    return number, os.getpid()


def dying_elsewhere(home: int) -> int:
    if os.getpid() != home:
        os._exit(1)
    return home


def refusing() -> None:
    raise Infeasible("nothing fits", [PROBLEM])


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 2), (64, PROCESSES)])
def test_all_processes_work_and_results_keep_their_order(cores: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with beside(worth=True) as later:
        found = results([later(slow, number) for number in range(24)])  # 5 s, and a process starts within 3
    assert [number for number, _ in found] == [*range(24)]
    assert os.getpid() in {process for _, process in found}
    assert len({process for _, process in found}) == processes


def test_what_is_not_worth_a_process_runs_in_this_one() -> None:
    with beside(worth=False) as later:
        assert later(slow, 7)() == (7, os.getpid())


def test_calls_of_a_process_that_dies_run_in_this_one() -> None:
    home = os.getpid()
    with beside(worth=True) as later:
        assert results([later(dying_elsewhere, home), later(dying_elsewhere, home), later(os.getpid)]) == [home] * 3


ENDLESS = """
import os, time
from megatron_lynx.beside import beside

def endless():
    while True:
        print(os.getpid(), flush=True)
        time.sleep(0.1)

if __name__ == "__main__":
    os.cpu_count = lambda: 4
    with beside(worth=True) as later:
        for _ in range(3):
            later(endless)
        time.sleep(3600)
"""


def test_no_process_outlives_a_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    command = subprocess.Popen([sys.executable, tmp_path / "endless.py"], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    others = set[int]()
    while len(others) < 3:
        others.add(int(command.stdout.readline()))
    command.kill()
    closed = False
    with suppress(subprocess.TimeoutExpired):
        command.communicate(timeout=20)  # until the last process has closed its output
        closed = True
    for other in () if closed else others:
        os.kill(other, signal.SIGKILL)
    assert closed


@pytest.mark.parametrize("worth", [False, True])
def test_a_refusal_arrives_with_its_problems(worth: bool) -> None:
    with beside(worth=worth) as later, pytest.raises(Infeasible, match="nothing fits") as refusal:
        later(refusing)()
    assert refusal.value.problems == (PROBLEM,)
