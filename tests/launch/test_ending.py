"""How a run ends: what is concluded, and that an abort shows itself.

One of about forty runs of the real script ended with status 1 behind its last evaluation, all digits equal, the check clean, and
nothing that said why: torchrun's status is 1 whatever becomes of a rank, and one that aborts while it ends is silent.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lynx.launch.ending import Ended, concluded
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from .launched import MODEL, SIZE, saved


def test_an_abort_behind_the_last_evaluation_shows_itself(run, tmp_path):
    plan = saved(uniform_plan(tiny_job("gpt", microbatches=4, **SIZE)), tmp_path / "plan.yaml")
    arguments = [*MODEL, "--train-iters", "2", "--lynx-plan", plan]
    env = {"FAULT": "abort", "RANK_OF_FAULT": "0"}
    ended = run(Path(__file__).with_name("pretrain_faulty.py"), arguments, env=env)
    assert ended.status == 1
    assert len(ended.iterations) == 2
    assert "Fatal Python error: Aborted" in ended.text.splitlines()


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
