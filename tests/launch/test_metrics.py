"""What a plan did, in the logs that Megatron writes: numbers of all ranks, at the steps at which Megatron logs."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lynx.figures import figures_of
from megatron_lynx.launch.reporter import Metrics
from megatron_lynx.measure.run_outcome import StageMeasured, StagePredicted

from . import metrics_on_ranks
from .launched import MODEL, flags_of, launch, offloading, plan_of, saved

INTERLEAVED = "pipeline 2, two chunks on each stage"


def logged(args):
    """What both writers are calls in six steps, and the total."""
    scalars, wandb, engine = [], [], metrics_on_ranks.Counted()
    board = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    metrics = Metrics(args, board, SimpleNamespace(log=lambda figures, step: wandb.append((step, figures))))
    for step in range(6):
        args.curr_iteration = step
        metrics.step_ends(engine)
    metrics.write()
    assert engine.exact == {False}, "nothing waits for a device"
    return scalars, wandb, metrics.total


def test_steps_that_megatron_logs_are_logged():
    args = SimpleNamespace(tensorboard_dir="logs", tensorboard_log_interval=2)
    scalars, wandb, total = logged(args)
    assert [(step, value) for name, value, step in scalars if name == "lynx/recomputations_hidden"] == [
        (2, 2.0),
        (4, 4.0),
        (6, 6.0),
    ]
    assert [step for step, _ in wandb] == [2, 4, 6]
    assert wandb[0][1] == {name: value for name, value, step in scalars if step == 2}
    assert {name for name, _, _ in scalars} >= {"lynx/host_bytes", "lynx/copied_to_host_bytes", "lynx/exposed_copy_s"}
    assert (total.in_windows, total.host_bytes, total.offloaded_bytes) == (21, 7, 600)


def test_what_is_known_besides_is_logged_and_what_is_not_is_left_out():
    scalars: list[tuple[str, float, int]] = []
    board = SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar))
    metrics = Metrics(SimpleNamespace(tensorboard_dir="logs", tensorboard_log_interval=1, curr_iteration=0), board)
    counts = metrics.step_ends(metrics_on_ranks.Counted(), lambda counts: {"passes_s": 0.5, "device_reserved_peak_bytes": None})
    metrics.write()
    assert counts.in_windows == 1
    assert ("lynx/passes_s", 0.5, 1) in scalars
    assert "lynx/device_reserved_peak_bytes" not in {name for name, _, _ in scalars}


NAMES = (
    *("host_bytes", "copied_to_host_bytes", "copied_back_bytes", "exposed_copy_s", "deferred_bytes"),
    *("recomputations_hidden", "recomputations_on_demand", "recompute_in_windows_s", "recompute_on_demand_s"),
    *("weight_gradients_in_waits", "weight_gradients_flushed", "passes_s", "step_s", "predicted_passes_s"),
    *("device_peak_bytes", "device_reserved_peak_bytes", "predicted_device_peak_bytes"),
)


def test_series_that_users_plot_keep_their_names():
    logs = [figure.logged for kind in (StageMeasured, StagePredicted) for figure in figures_of(kind).values() if figure.logged]
    assert sorted(logs) == sorted(NAMES)


def test_without_a_log_only_the_total_is_kept():
    scalars, wandb, total = logged(SimpleNamespace(tensorboard_log_interval=1))
    assert (scalars, wandb, total.in_windows) == ([], [], 21)


def test_a_finished_run_of_wandb_gets_nothing():
    """Where its loop exits, Megatron ends W&B's run first; who logs after that gets an error."""
    steps: list[int] = []
    wandb = SimpleNamespace(run="running", log=lambda figures, step: steps.append(step))
    args = SimpleNamespace(wandb_project="ours", tensorboard_log_interval=1, curr_iteration=0)
    metrics = Metrics(args, None, wandb)
    metrics.step_ends(metrics_on_ranks.Counted())
    metrics.write()
    metrics.step_ends(metrics_on_ranks.Counted())
    wandb.run = None
    metrics.write()
    assert steps == [1]


def test_the_rank_that_logs_has_the_most_of_all_ranks(pool_of):
    assert pool_of(2).run(metrics_on_ranks.logged)[-1] == 2.0


def test_a_launch_that_logs_to_tensorboard(tmp_path):
    """Megatron's writer is the last rank's; the first stage, which offloads more, is in what it writes."""
    wheel = Path(os.environ.get("MEGATRON_CORE_0_19_DIR", "")).resolve()
    if not (wheel / "megatron" / "training").is_dir():
        pytest.skip(f"no megatron.training in {wheel} (MEGATRON_CORE_0_19_DIR; `make test` downloads it where it can)")
    found = importlib.util.find_spec("tensorboard")
    if found is None or found.origin is None:
        pytest.skip("no tensorboard here: Megatron writes no logs without it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = saved(offloading(plan_of(INTERLEAVED, recompute="none"), 200_000), tmp_path / "plan.yaml")
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
