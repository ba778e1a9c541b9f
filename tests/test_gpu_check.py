"""The script for GPUs, run as far as a CPU can run it: everything but the device."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megatron_lynx.measure.measurement import load_measurement

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_dry_run_of_the_gpu_check(tmp_path: Path) -> None:
    command = ["scripts/gpu_check.sh", "--dry-run", "--rounds", "1", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    exact = json.loads((tmp_path / "exact.json").read_text())
    assert {equal for plans in exact["equal to stock in every bit"].values() for equal in plans.values()} == {True}
    assert all("DRY RUN" in text for text in (run.stdout, exact["note"], (tmp_path / "report.md").read_text()))
    offload = json.loads((tmp_path / "offload.json").read_text())
    assert all(rate > 0 for rate in offload["link, GB/s"].values())
    assert {key for key in offload if key.startswith("one layer")} == {"one layer, sequence 64", "one layer, sequence 128"}
    assert offload["order"]["tests"].startswith("exit status 0")
    assert offload["Megatron's own"], "seconds, or why not"
    for part, kind in (("memory", "none"), ("emulated-interconnect", "emulated")):
        measurement = load_measurement(tmp_path / part / "measurement.json")
        assert ("DRY RUN" in measurement.subject, measurement.machine.links.kind) == (True, kind)
        ours = {setting.name: setting for setting in measurement.settings if setting.ours}
        assert all(setting.gradients_equal for setting in ours.values())
        assert (ours["ours"].hidden_replays > 0) == (kind == "emulated"), "windows are where the collectives are"
