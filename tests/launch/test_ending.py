"""A run that ends badly says on which rank, how far it was and why.

One of about forty runs of the real script ended with status 1 behind its last evaluation, all digits equal, the check clean, and
nothing that said why: torchrun's status is 1 whatever becomes of a rank, and one that exits, or aborts while it ends, is silent.
"""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch.ending import Ended, concluded, named_ending
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.tiny_jobs import tiny_job

from .launched import MODEL, SIZE, saved

BEHIND = "behind its training loop, 2 steps, when nothing of megatron-lynx ran any more"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise", f"megatron-lynx: rank 0 ended {BEHIND}: ConnectionError: the last thing that a script does"),
        ("abort", "Fatal Python error: Aborted"),
    ],
)
def test_behind_the_last_evaluation(run, tmp_path, fault, says):
    plan = saved(uniform_plan(tiny_job("gpt", microbatches=4, **SIZE)), tmp_path / "plan.yaml")
    arguments = [*MODEL, "--train-iters", "2", "--lynx-plan", plan]
    env = {"FAULT": fault, "RANK_OF_FAULT": "0"}
    ended = run(Path(__file__).with_name("pretrain_faulty.py"), arguments, env=env)
    assert ended.status == 1
    assert len(ended.iterations) == 2
    assert says in ended.text.splitlines()


def said(error: BaseException | None) -> str:
    """What is said of a run that ends like this."""
    text = io.StringIO()
    ended: BaseException | None = None
    with redirect_stderr(text):
        try:
            with named_ending(lambda: "in step 3"):
                if error is not None:
                    raise error
        except BaseException as left:  # noqa: BLE001 (whatever it is)
            ended = left
    assert ended is error, "it ends as it would have ended"
    return text.getvalue()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (None, ""),
        (SystemExit(0), ""),
        (SystemExit(), ""),
        (SystemExit(7), "megatron-lynx: rank 0 ended in step 3: sys.exit(7)\n"),
        (SystemExit("no data"), "megatron-lynx: rank 0 ended in step 3: sys.exit('no data')\n"),
        (ValueError("one\ntwo"), "megatron-lynx: rank 0 ended in step 3: ValueError: one\n"),
        (KeyboardInterrupt(), "megatron-lynx: rank 0 ended in step 3: KeyboardInterrupt\n"),
        (Ended(2), ""),
        (ConfigError("wrong", [Problem("a", "b", "c")]), ""),
    ],
    ids=["well", "exit 0", "exit", "exit 7", "exit with words", "error", "Ctrl-C", "agreed", "ours, said elsewhere"],
)
def test_what_is_said(error, says, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert said(error) == says


@pytest.mark.parametrize(
    ("error", "in_step", "ended_well"),
    [
        (None, False, True),
        (SystemExit(0), False, True),
        (SystemExit(), False, True),
        (SystemExit(0), True, False),
        (SystemExit(16), False, False),
        (SystemExit("no data"), False, False),
        (Ended(2), False, False),
        (ValueError(), False, False),
    ],
    ids=["returns", "exit 0", "exit", "exit 0 in a step", "exit 16", "exit with words", "agreed", "error"],
)
def test_a_loop_that_exits_by_0_has_ended_as_it_should(error, in_step, ended_well):
    """Megatron calls sys.exit(0) inside its loop when its time is over: the last table was lost, and `finished` stayed false."""
    concluding, left = [], None
    try:
        with concluded(lambda: concluding.append("once"), lambda: not in_step):
            if error is not None:
                raise error
    except BaseException as raised:  # noqa: BLE001 (whatever it is)
        left = raised
    assert left is error
    assert concluding == ["once"] * ended_well


def test_an_abort_while_the_interpreter_ends_shows_itself():
    """A thread of a library may abort when all Python code has run."""
    script = """
import atexit, os
from megatron_lynx.launch.ending import concluded, named_ending
with named_ending(lambda: ""):
    atexit.register(os.abort)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert ended.returncode < 0
    assert "Fatal Python error: Aborted" in ended.stderr
