"""`--lynx-schedule double-buffered` through the `megatron.training` of the newest wheel, on two ranks of this machine.

Six batches, evaluated behind the fourth; checkpoints behind the third. What it must equal is in `pretrain_versions.py`.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path

import pytest

from .launched import MODEL, launch, offloading, plan_of, saved

HERE = Path(__file__).parent
SCRIPT = HERE / "pretrain_tiny.py"
VERSIONS = HERE / "pretrain_versions.py"
VALIDATION = re.compile(r"validation loss at iteration (\d+) .*lm loss value: (\S+) ")
FLAGS = [
    *MODEL,
    *("--pipeline-model-parallel-size", "2", "--rerun-mode", "disabled"),
    # On CPU, data loaders draw from the generator of hidden dropout when they begin: a resumed run has other masks, stock's too.
    *("--hidden-dropout", "0"),
    *("--train-iters", "6", "--split", "90,10,0", "--eval-iters", "1", "--eval-interval", "4"),
]
WITHOUT = ["--lynx-schedule", "double-buffered"]


@pytest.fixture(scope="module")
def run():
    """`run(script, flags)` launches a script on two ranks."""
    wheel = Path(os.environ.get("MEGATRON_CORE_0_19_DIR", "")).resolve()
    if not (wheel / "megatron" / "training").is_dir():
        pytest.skip(f"no megatron.training in {wheel} (MEGATRON_CORE_0_19_DIR; `make test` downloads it where it can)")
    return partial(launch, path=[wheel], ranks=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def undrained(run, folder):
    return run(SCRIPT, [*FLAGS, *WITHOUT, "--save", folder / "saved", "--save-interval", "3"])


def test_every_printed_digit_is_that_of_the_version_rule(run, undrained):
    expected = run(VERSIONS, FLAGS, env={"DRAINED": "3,4"})
    assert (expected.status, undrained.status) == (0, 0), undrained.text
    assert len(expected.iterations) == 6
    assert undrained.iterations == expected.iterations
    assert VALIDATION.findall(undrained.text) == VALIDATION.findall(expected.text) != []


def test_it_says_what_it_does(undrained):
    [said] = undrained.ours
    assert "training without flushes, on gradients that are one update old" in said


@pytest.mark.long
def test_a_signal_saves_one_batch_later_and_nothing_is_lost(run, folder, undrained):
    """Asked to stop behind the second batch, when forwards of the third have begun: that one drains, and is saved."""
    flags = [*FLAGS, *WITHOUT, "--save", folder / "asked", "--save-interval", "100", "--exit-signal-handler"]
    asked = run(VERSIONS, flags, env={"SIGNAL": "2"})
    assert asked.status == 0, asked.text
    assert "exiting program after receiving SIGTERM" in asked.text
    assert asked.iterations == undrained.iterations[:3]
    resumed = run(SCRIPT, [*FLAGS, *WITHOUT, "--load", folder / "asked"])
    expected = run(VERSIONS, [*FLAGS, "--load", folder / "asked"], env={"DRAINED": "4"})
    assert resumed.iterations == expected.iterations
    gone_on = undrained.iterations[3:]
    assert [norm for _, _, norm in resumed.iterations] == [norm for _, _, norm in gone_on]
    assert resumed.iterations[::2] == gone_on[::2], "the second loss behind a resume is Megatron's mean of two"


def test_under_a_plan(run, folder, undrained):
    """Everything recomputed, its first half while the gradient is awaited; some on the host. Frames are checked, though a
    backward may come a batch behind its forward. A plan that flushes is refused."""
    plan = plan_of("pipeline 2")
    assert plan.schedule == "flush"
    refused = run(SCRIPT, [*FLAGS, *WITHOUT, "--lynx-plan", saved(plan, folder / "flush.yaml")])
    assert "--lynx-schedule: found double-buffered, needed flush, as the plan has it" in refused.text
    plan = offloading(plan_of("pipeline 2", schedule="double_buffered"), 20_000)
    flags = [*FLAGS, *WITHOUT, "--save", folder / "planned", "--save-interval", "3"]
    flags += ["--lynx-check", "frames:2"]
    planned = run(SCRIPT, [*flags, "--lynx-plan", saved(plan, folder / "plan.yaml")])
    assert planned.status == 0, planned.text
    assert planned.iterations == undrained.iterations
    assert "recomputed 96 layer halves: 24 inside windows, 72 on demand" in planned.text
    assert "copied to the host" in planned.text
    assert "checked 1" in planned.text
    assert " frames in 2 steps on 2 ranks, of all " in planned.text


def test_what_does_not_go_together_is_said_at_once(run):
    flags = [*FLAGS, "--rerun-mode", "validate_results", "--overlap-grad-reduce", "--overlap-param-gather"]
    flags += ["--use-distributed-optimizer", "--micro-batch-size", "8", "--fp16"]
    refused = run(SCRIPT, [*flags, *WITHOUT])
    assert refused.status != 0
    headline, *problems = refused.ours
    assert headline == "megatron-lynx: this launch cannot train without flushes"
    assert "micro-batches per update: found 1 (--global-batch-size 8 / 8 / 1), needed at least 2" in problems[0]
    assert {problem.split(":")[0] for problem in problems[1:]} == {"  - --rerun-mode", "  - --overlap-param-gather", "  - --fp16"}
    assert "/megatron_lynx/" not in refused.text, "no traceback of ours"
