"""`megatron-lynx report`: what it makes from which files, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lynx.timeline import Timeline, write_trace
from tests.report.samples import as_if_run, rows_in, run_folder, simulated, table_in, tiles_in
from tests.test_cli import lynx


def reported(tmp_path: Path, *what: object) -> str:
    result = lynx("report", *what, "-o", tmp_path / "report.html")
    assert result.exit_code == 0, result.stderr
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_plan_with_its_profile_is_simulated(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    page = reported(tmp_path, folder / "plan.yaml", "--profile", folder / "profile.yaml")
    assert "One step, predicted" in page
    assert "One step, measured" not in page
    assert tiles_in(page)["passes"] == (simulated().step_s, None)
    assert rows_in(page) == [["stage 0", "stage 1"]]
    assert "layout  tensor 2, pipeline 2\nbatch   3 micro-batches of 2\n" in page


def test_a_plan_without_figures_is_shown_as_it_is(tmp_path: Path) -> None:
    page = reported(tmp_path, run_folder(tmp_path / "run") / "plan.yaml")
    assert rows_in(page) == []
    assert "stage 1: layers 3-4" in page
    assert "no figures" in page


def test_a_comparison_is_predicted_beside_measured(tmp_path: Path) -> None:
    page = reported(tmp_path, run_folder(tmp_path / "run"))
    predicted_s, measured_s = tiles_in(page)["passes"]
    assert predicted_s == simulated().step_s
    assert measured_s == pytest.approx(as_if_run().seconds)
    assert rows_in(page) == [["stage 0", "stage 1"], [f"stage {rank // 2}, rank {rank}" for rank in range(4)]]
    assert [row[:2] for row in table_in(page, "stages")][:2] == [["stage 0", "predicted"], ["stage 1", "predicted"]]
    assert 'class="verdict">ours in windows' in page


def test_a_job_is_planned_for_several_budgets(tmp_path: Path) -> None:
    page = reported(tmp_path, "jobs/llama3-8b-h800-80g", "--budgets", 3)
    settings = [row[0] for row in table_in(page, "plans")]
    assert settings[0] == "the plan"
    assert settings[-3:] == ["stock none", "stock selective", "stock full"]
    assert "<h1>jobs/llama3-8b-h800-80g</h1>" in page
    assert page.count('class="budget"') == 2, "beside the devices and among the plans"
    assert page.count("<circle") == len(settings)


def test_what_simulate_wrote_is_drawn(tmp_path: Path) -> None:
    simulation = simulated()
    memory = {stage: simulation.memory(stage) for stage in (0, 1)}
    write_trace(simulation.timeline(), tmp_path / "trace.json", "stage", memory)
    page = reported(tmp_path, tmp_path / "trace.json")
    assert rows_in(page) == [["stage 0", "stage 1"]]
    assert table_in(page, "stages")[0][-1] == memory[0].peak_bytes


def other_trace(tmp_path: Path, timeline: Timeline) -> Path:
    write_trace(timeline, tmp_path / "other.json")
    return tmp_path / "other.json"


def refused(tmp_path: Path, *what: object) -> str:
    result = lynx("report", *what, "-o", tmp_path / "report.html")
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "report.html").exists()
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".tmp"] == []
    return result.stderr


def test_a_run_without_a_plan(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    said = refused(tmp_path, folder / "trace.json")
    assert "trace.json: found no plan named with it, needed the plan under which it ran; name that plan as well" in said
    said = refused(tmp_path, folder / "measurement.json", folder / "profile.yaml")
    assert "measurement.json: found no plan named with it" in said


def test_a_trace_that_breaks_off(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    whole = (folder / "trace.json").read_bytes()
    (folder / "trace.json").write_bytes(whole[: len(whole) // 2])
    said = refused(tmp_path, folder)
    assert "trace.json: found JSON that breaks off or is damaged at character" in said
    assert f"of {len(whole) // 2}, needed whole JSON" in said
    assert "trace a step again" in said
    for events, answer in (
        ("{}", "found dict, needed a list of events"),
        ("[]", "no event with a duration"),
        ('[{"ph": "X", "pid": 0, "ts": 1}]', "traceEvents.0: found"),
        ('[{"ph": "X", "pid": 0, "ts": 1, "dur": -2, "cat": "forward", "name": "x"}]', "lasts -2"),
    ):
        (folder / "trace.json").write_text(f'{{"traceEvents": {events}}}')
        assert answer in refused(tmp_path, folder)


def test_a_trace_of_another_job(tmp_path: Path) -> None:
    folder, run = run_folder(tmp_path / "run"), as_if_run()
    (folder / "trace.json").unlink()
    three = other_trace(tmp_path, Timeline({rank: run.ranks[rank] for rank in range(3)}))
    assert "rank 1: found layers 1-2, needed layers 3-4, which stage 1 owns" in refused(tmp_path, folder, three)
    turned = other_trace(tmp_path, Timeline({rank: run.ranks[3 - rank] for rank in range(4)}))
    said = refused(tmp_path, folder, turned)
    assert "rank 0: found layers 3-4, needed layers 1-2, which stage 0 owns" in said


def test_other_wrong_requests(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.json").write_text('{"a": 1}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bytes.json").write_bytes(b'{"\xff"}')
    for answer, what in (
        ("a folder with nothing to draw", [tmp_path / "empty"]),
        ("found keys a, needed a plan, a job", [tmp_path / "note.json"]),
        ("JSON with a list at the top", [tmp_path / "list.json"]),
        ("a byte that is no text", [tmp_path / "bytes.json"]),
        ("no such file", [tmp_path / "none.json"]),
        ("a second plan, beside", [folder, folder / "plan.yaml"]),
        ("found profile, needed a plan", [folder / "profile.yaml"]),
        ("there are no figures to plan with", ["jobs/pipeline"]),
    ):
        assert answer in refused(tmp_path, *what), what
    result = lynx("report", folder / "plan.yaml", "-o", folder / "plan.yaml")
    assert (result.exit_code, "a file that is read" in result.stderr) == (2, True)
