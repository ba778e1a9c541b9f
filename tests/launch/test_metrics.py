"""What a plan did, in the logs that Megatron writes: numbers of all ranks, at the steps at which Megatron logs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lynx.launch.metrics import Metrics
from megatron_lynx.runtime.counts import Counts

from .launched import MODEL, flags_of, launch, offloading, plan_of, saved

INTERLEAVED = "pipeline 2, two chunks on each stage"


class Counted:
    """An engine that counts one thing more in each step."""

    def __init__(self):
        self.steps = 0
        self.exact = set()

    def take_counts(self, *, exact=True):
        self.steps += 1
        self.exact.add(exact)
        return Counts(hidden=self.steps, host_bytes=7, offloaded_bytes=100, exposed_copy_s=0.5)


def logged(args):
    """What both writers are told in six steps, and the total."""
    scalars, wandb, engine = [], [], Counted()
    board = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    metrics = Metrics(args, board, SimpleNamespace(log=lambda figures, step: wandb.append((step, figures))))
    for step in range(6):
        args.curr_iteration = step
        metrics.step_ends(engine)
    metrics.close()
    assert engine.exact == {False}, "nothing waits for a device"
    return scalars, wandb, metrics.total


def test_steps_that_megatron_logs_are_logged():
    args = SimpleNamespace(tensorboard_dir="logs", tensorboard_log_interval=2)
    scalars, wandb, total = logged(args)
    assert [(step, value) for name, value, step in scalars if name == "lynx/replays_hidden"] == [(2, 2.0), (4, 4.0), (6, 6.0)]
    assert [step for step, _ in wandb] == [2, 4, 6]
    assert wandb[0][1] == {name: value for name, value, step in scalars if step == 2}
    assert {name for name, _, _ in scalars} >= {"lynx/host_bytes", "lynx/copied_to_host_bytes", "lynx/exposed_copy_s"}
    assert (total.hidden, total.host_bytes, total.offloaded_bytes) == (21, 7, 600)


def test_what_is_known_besides_is_logged_and_what_is_not_is_left_out():
    scalars: list[tuple[str, float, int]] = []
    board = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    metrics = Metrics(SimpleNamespace(tensorboard_dir="logs", tensorboard_log_interval=1, curr_iteration=0), board)
    counts = metrics.step_ends(Counted(), lambda: {"passes_s": 0.5, "device_reserved_peak_bytes": None})
    metrics.close()
    assert counts.hidden == 1
    assert ("lynx/passes_s", 0.5, 1) in scalars
    assert "lynx/device_reserved_peak_bytes" not in {name for name, _, _ in scalars}


def test_without_a_log_only_the_total_is_kept():
    scalars, wandb, total = logged(SimpleNamespace(tensorboard_log_interval=1))
    assert (scalars, wandb, total.hidden) == ([], [], 21)


def test_a_launch_that_logs_to_tensorboard(tmp_path):
    """Megatron's writer is the last rank's; the first stage, which offloads more, is in what it writes."""
    wheel = Path(os.environ.get("MEGATRON_CORE_0_19_DIR", "")).resolve()
    if not (wheel / "megatron" / "training").is_dir():
        pytest.skip(f"no megatron.training in {wheel} (MEGATRON_CORE_0_19_DIR; `make test` downloads it where it can)")
    found = importlib.util.find_spec("tensorboard")
    if found is None or found.origin is None:
        pytest.skip("no tensorboard here: Megatron writes no logs without it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = saved(offloading(plan_of(INTERLEAVED, replay="none"), 200_000), tmp_path / "plan.yaml")
    flags = [*MODEL, *flags_of(INTERLEAVED), "--tensorboard-dir", tmp_path / "logs", "--tensorboard-log-interval", "2"]
    run = launch(
        Path(__file__).with_name("pretrain_tiny.py"),
        [*flags, "--lynx-plan", plan],
        ranks=2,
        path=[wheel, Path(found.origin).parents[1]],
    )
    assert run.status == 0, run.text
    events = EventAccumulator(str(tmp_path / "logs"))
    events.Reload()
    series = {name: events.Scalars(name) for name in events.Tags()["scalars"] if name.startswith("lynx/")}
    assert {name: [each.step for each in values] for name, values in series.items()} == {name: [2, 4] for name in series}
    assert len(series) >= 6, "and device bytes, where something answers for CUDA"
    assert set(series) >= {"lynx/passes_s", "lynx/step_s"}
    per_step = {each.value for each in series["lynx/copied_to_host_bytes"]}
    assert per_step == {float(2 * 4 * 200_000)}, "two chunks of four micro-batches, on the stage that offloads all of them"
    assert {each.value for each in series["lynx/copied_back_bytes"]} == per_step
    assert all(each.value > 0 for each in series["lynx/host_bytes"])
