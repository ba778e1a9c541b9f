"""A run's outcome beside its plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lynx.measure.run_outcome import (
    FILE_NAME,
    Report,
    RunOutcome,
    StageMeasured,
    StagePredicted,
    StageRow,
    save_outcome,
)
from megatron_lynx.plan import Plan, save_plan
from megatron_lynx.plan.plan import Predicted
from megatron_lynx.report.contents import devices_of
from megatron_lynx.report.drawing import Device
from tests.report.samples import PLAN, table_in, tiles_in
from tests.report.test_cli_report import refused, reported

PARTS = {
    "always": {"parameters": 500, "optimizer": 300},
    "forward": {"activations": 90},
    "loss": {"activations": 80, "logits": 40},
}


def plan() -> Plan:
    """The plan, saying what stage 0 holds at each moment."""
    first = PLAN.stages[0].model_copy(update={"predicted": Predicted(step_s=2.0, update_s=0.25, memory_bytes=920, memory=PARTS)})
    return PLAN.model_copy(update={"stages": (first, *PLAN.stages[1:])})


def row(stage: int, passes_s: float | None, allocated_bytes: int) -> StageRow:
    predicted = (
        StagePredicted(passes_s=2.0, memory_bytes=920, hidden_recompute_s=0.5, exposed_recompute_s=0.0) if stage == 0 else None
    )
    measured = StageMeasured(ranks=2, passes_s=passes_s, step_s=2.5, allocated_bytes=allocated_bytes, in_windows_s=0.4)
    return StageRow(stage=stage, predicted=predicted, measured=measured)


def run_under(plan: Plan, folder: Path) -> Path:
    reports = (
        Report(when="step", step=1, stages=(row(0, 2.2, 900), row(1, 2.25, 700))),
        Report(when="end", step=9, stages=(row(0, None, 910), row(1, None, 720))),
    )
    outcome = RunOutcome(
        made_by="a test",
        megatron_core="0.16.1",
        plan="plan.yaml",
        plan_digest=plan.digest,
        ranks=4,
        finished=True,
        reports=reports,
    )
    folder.mkdir(exist_ok=True)
    save_outcome(outcome, folder / FILE_NAME)
    return folder / FILE_NAME


def test_predicted_and_measured_of_every_stage(tmp_path: Path) -> None:
    save_plan(plan(), tmp_path / "plan.yaml")
    run_under(plan(), tmp_path)
    page = reported(tmp_path, tmp_path / "plan.yaml", tmp_path / FILE_NAME)
    rows = table_in(page, "outcome")
    assert [line[:2] for line in rows] == [["step 1", 0], ["step 1", 1], ["the end", 0], ["the end", 1]]
    assert rows[2] == ["the end", 0, 920, 910, None, 2.0, None, 2.5, 0.5, 0.4, 0.0, None]
    assert rows[3][2] is None, "nothing was predicted of stage 1"
    assert tiles_in(page) == {"step": (2.25, 2.5), "passes": (2.0, 2.25), "fullest device": (920, 910)}
    assert list(devices_of(plan(), {0: 910, 1: 720})) == [
        Device(0, "loss", {"parameters": 500, "optimizer": 300, "activations": 80, "logits": 40}, 910),
        Device(1, "", {}, 720),
    ]
    assert "920 B, loss; measured 910 B" in page


@pytest.mark.parametrize("named", ["folder", "file"])
def test_without_its_plan_or_under_another_one(tmp_path: Path, named: str) -> None:
    folder = tmp_path / "run"
    what = run_under(plan(), folder) if named == "file" else run_under(plan(), folder).parent
    assert f"{FILE_NAME}: found no plan named with it, needed the plan under which it ran" in refused(tmp_path, what)
    save_plan(PLAN, tmp_path / "other.yaml")
    said = refused(tmp_path, what, tmp_path / "other.yaml")
    assert f"plan_digest: found {plan().digest[:12]}..., needed {PLAN.digest[:12]}..., the plan's; give plan.yaml" in said
