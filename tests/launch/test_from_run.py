"""A plan that has learned from its run holds what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lynx.measure.run_outcome import FILE_NAME, Report, load_outcome
from megatron_lynx.plan import load_plan
from megatron_lynx.profiler.profile import save_profile
from megatron_lynx.units import GIB
from megatron_lynx.yaml_file import write_yaml
from tests.tiny_jobs import tiny_job

from ..profiler.made_up import made_up_profile
from ..test_cli import lynx
from .launched import MODEL, SIZE, flags_of

BUDGET_BYTES = 4_000_000
"""A first plan fills it to the last kilobyte, and what a launch holds beside training is not in it. With 3,900,000 the first
plan's fullest backward is counted 128 KiB larger than it is: its run teaches that much less, and the second one holds 3 % more
than its plan says."""

NEARLY = 0.2 / 80
"""0.2 GiB of a GPU with 80."""


@pytest.mark.long
@pytest.mark.parametrize("budget_bytes", [None, BUDGET_BYTES], ids=["the same plan", "budget"])
def test_a_second_run_holds_what_its_plan_says(run, tmp_path: Path, budget_bytes):
    """Seconds are not looked at: those of a machine with other work are nobody's price."""
    asked = asked_for(tmp_path, budget_bytes)
    assert lynx(*asked).exit_code == 0
    first = launched(run, tmp_path)
    assert any(row.measured.allocated_bytes != row.predicted.memory_bytes for row in first.stages)

    again = lynx(*asked, "--from-run", tmp_path / FILE_NAME)
    assert again.exit_code == 0, again.output
    assert "learned from " in again.stdout
    second = launched(run, tmp_path)
    for row in second.stages:
        assert row.measured.allocated_bytes == pytest.approx(row.predicted.memory_bytes, rel=NEARLY)
    if budget_bytes is not None:
        assert max(row.measured.allocated_bytes for row in first.stages) > budget_bytes
        assert max(row.measured.allocated_bytes for row in second.stages) <= budget_bytes
    learned = load_plan(tmp_path / "plan.yaml").provenance.learned
    assert learned is not None
    assert load_outcome(tmp_path / FILE_NAME).learned == learned


def asked_for(folder: Path, budget_bytes: int | None) -> list[object]:
    """The command that plans for two ranks, with figures that nobody measured."""
    job = tiny_job("gpt", pipeline=2, microbatches=4, **SIZE)
    if budget_bytes is not None:
        job = job.model_copy(update={"budget": job.budget.model_copy(update={"memory_gib": budget_bytes / GIB})})
    (folder / "job.yaml").write_text(write_yaml(job.model_dump(mode="json", by_alias=True)))
    save_profile(made_up_profile(job, 1e-5), folder / "profile.yaml")
    return ["plan", folder / "job.yaml", "--profile", folder / "profile.yaml", "-o", folder / "plan.yaml"]


def launched(run, folder: Path) -> Report:
    """The figures behind a run of five steps. Its file then says that seconds were as predicted."""
    flags = [*MODEL, *flags_of("pipeline 2"), "--lynx-plan", folder / "plan.yaml", "--lynx-outcome", folder / FILE_NAME]
    done = run(Path(__file__).with_name("pretrain_tiny.py"), flags, ranks=2)
    assert done.status == 0, done.text
    outcome = json.loads((folder / FILE_NAME).read_text())
    for row in outcome["reports"][-1]["stages"]:
        halves = {kind: row["measured"]["parts"][kind] for kind in ("attention", "mlp")}
        assert {kind: each["count"] for kind, each in halves.items()} == {"attention": 8, "mlp": 8}, (
            "two layers, four micro-batches"
        )
        assert all(each["seconds"] > 0 for each in halves.values())
        row["measured"] |= {"passes_s": row["predicted"]["passes_s"], "parts": None}
    (folder / FILE_NAME).write_text(json.dumps(outcome))
    return load_outcome(folder / FILE_NAME).reports[-1]
