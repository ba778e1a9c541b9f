"""`megatron-lynx simulate`: what it answers, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lynx.cli.answers import write_comparison
from megatron_lynx.plan import save_plan
from megatron_lynx.profiler.profile import save_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.testbed.comparison import Comparison
from tests.compare.test_report import measurement
from tests.profiler.made_up import made_up_profile
from tests.report.samples import PLAN, as_if_run, rows_in, table_in
from tests.test_cli import lynx
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

JOB = tiny_job("llama", tensor=2, pipeline=2, microbatches=3)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    save_plan(uniform_plan(JOB), tmp_path / "plan.yaml")
    save_profile(made_up_profile(JOB), tmp_path / "profile.yaml")
    return tmp_path / "plan.yaml", tmp_path / "profile.yaml"


def test_figures_and_trace(files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, profile = files
    trace = tmp_path / "new" / "step.json"
    result = lynx("simulate", plan, "--profile", profile, "--trace", trace, "--json")
    assert result.exit_code == 0, result.stderr
    simulation = rehearse(uniform_plan(JOB), made_up_profile(JOB))
    answer = json.loads(result.stdout)
    assert (answer["passes_s"], answer["step_s"]) == (simulation.step_s, None), "no job says what its update takes"
    assert [stage["peak_activation_bytes"] for stage in answer["stages"]] == [
        simulation.memory(stage).peak_bytes for stage in (0, 1)
    ]
    actions = [row["action"] for row in answer["stages"][0]["actions"]]
    assert actions == ["0F0", "1F0", "0R0", "0B0", "2F0", "1R0", "1B0", "2R0", "2B0"], "the last half in receives"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"stage 0", "stage 1"}
    held = [event["args"]["held"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(held) == simulation.memory(0).peak_bytes


def test_in_words(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    plan, profile = files
    result = lynx("simulate", plan, "--profile", profile)
    assert result.exit_code == 0, result.stderr
    for text in ("one step, without the optimizer's update: ", "bubble", "recompute exposed", "activations"):
        assert text in result.stdout


def test_wrong_requests(files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, profile = files
    save_profile(made_up_profile(tiny_job("llama", tensor=1, hidden=64)), tmp_path / "other.yaml")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for answers, arguments in (
        (["no such file"], (plan, "--profile", tmp_path / "none.yaml")),
        (["shape.hidden: found 64, needed 32", "shape.tensor: found 1"], (plan, "--profile", tmp_path / "other.yaml")),
        (["folder: found a folder"], (plan, "--profile", profile, "--trace", tmp_path / "folder")),
        (["file/y.json: found"], (plan, "--profile", profile, "--trace", tmp_path / "file" / "y.json")),
        (["--profile"], (plan,)),
    ):
        result = lynx("simulate", *arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert all(answer in result.stderr for answer in answers), result.stderr


def test_a_comparison_is_written_with_a_page_that_draws_its_step(tmp_path: Path) -> None:
    """Without matplotlib, which drew it before: the page needs nothing."""
    written = write_comparison(Comparison(measurement(), as_if_run()), PLAN, tmp_path)
    assert {path.name for path in written} == {"measurement.json", "trace.json", "report.html"}
    page = (tmp_path / "report.html").read_text()
    assert rows_in(page) == [[f"stage {rank // 2}, rank {rank}" for rank in range(4)]]
    assert len(table_in(page, "stages")) == 4
