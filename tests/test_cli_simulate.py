"""`megatron-lynx simulate`: what it answers, and how it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatron_lynx.cli.answers import write_comparison
from megatron_lynx.plan import save_plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.profiler.profile import save_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.timeline import timeline_of
from megatron_lynx.testbed.comparison import Comparison
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.compare.test_report import measurement
from tests.compare.test_timeline_plot import STEP
from tests.profiler.made_up import made_up_profile
from tests.test_cli import lynx

JOB = tiny_job("llama", tensor=2, pipeline=2, microbatches=3)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra: whoever trains on a cluster has no use for it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    save_plan(uniform_plan(JOB), tmp_path / "plan.yaml")
    save_profile(made_up_profile(JOB), tmp_path / "profile.yaml")
    return tmp_path / "plan.yaml", tmp_path / "profile.yaml"


def test_figures_picture_and_trace(files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, profile = files
    plot, trace = tmp_path / "new" / "step.png", tmp_path / "new" / "step.json"
    result = lynx("simulate", plan, "--profile", profile, "--plot", plot, "--trace", trace, "--budget-mib", 4, "--json")
    assert result.exit_code == 0, result.stderr
    simulation = rehearse(uniform_plan(JOB), made_up_profile(JOB))
    answer = json.loads(result.stdout)
    assert (answer["passes_s"], answer["step_s"]) == (simulation.step_s, None), "no job says what its update takes"
    assert [stage["peak_activation_bytes"] for stage in answer["stages"]] == [
        simulation.memory(stage).peak_bytes for stage in (0, 1)
    ]
    actions = [row["action"] for row in answer["stages"][0]["actions"]]
    assert actions == ["0F0", "1F0", "0B0", "2F0", "1B0", "2R0", "2B0"], "in cool-down the last half is replayed in the receive"
    assert plot.read_bytes()[:4] == b"\x89PNG"
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"stage 0", "stage 1"}
    held = [event["args"]["held"] for event in events if event["ph"] == "C" and event["pid"] == 0]
    assert max(held) == simulation.memory(0).peak_bytes


def test_in_words(files: tuple[Path, Path]) -> None:
    plan, profile = files
    result = lynx("simulate", plan, "--profile", profile)
    assert result.exit_code == 0, result.stderr
    for text in ("one step, without the optimizer's update: ", "bubble", "replay exposed", "activations"):
        assert text in result.stdout


def test_wrong_requests(files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, profile = files
    save_profile(made_up_profile(tiny_job("llama", tensor=1, hidden=64)), tmp_path / "other.yaml")
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for answers, arguments in (
        (["no such file"], (plan, "--profile", tmp_path / "none.yaml")),
        (["shape.hidden: found 64, needed 32", "shape.tensor: found 1"], (plan, "--profile", tmp_path / "other.yaml")),
        (["could not be written"], (plan, "--profile", profile, "--plot", tmp_path / "file" / "x.png")),
        (
            ["folder: found a folder", "file/y.json: found"],
            (plan, "--profile", profile, "--plot", tmp_path / "folder", "--trace", tmp_path / "file" / "y.json"),
        ),
        (["--budget-mib"], (plan, "--profile", profile, "--budget-mib", -1)),
        (["--budget-mib", "found nan"], (plan, "--profile", profile, "--budget-mib", "nan")),
        (["--budget-mib", "found inf"], (plan, "--profile", profile, "--budget-mib", "1e400")),
        (["--profile"], (plan,)),
    ):
        result = lynx("simulate", *arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
        assert all(answer in result.stderr for answer in answers), result.stderr


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_a_picture_is_refused_with_what_to_install(files: tuple[Path, Path], tmp_path: Path) -> None:
    plan, profile = files
    trace = tmp_path / "step.json"
    refused = lynx("simulate", plan, "--profile", profile, "--plot", tmp_path / "step.png", "--trace", trace)
    assert refused.exit_code == 2
    assert "--plot: no matplotlib is installed; pip install matplotlib" in refused.stderr
    assert not trace.exists(), "refused before anything is written"
    assert lynx("simulate", plan, "--profile", profile, "--trace", trace).exit_code == 0


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_a_comparison_is_written_without_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = write_comparison(Comparison(measurement(), timeline_of({0: STEP})), tmp_path)
    assert {path.name for path in written} == {"compare.md", "compare.json", "measurement.json", "trace.json"}
    assert "timeline.png" not in (tmp_path / "compare.md").read_text()
    assert "pip install matplotlib" in capsys.readouterr().err
