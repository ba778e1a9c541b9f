"""`megatron-lynx report`: what it makes from which files, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.plan import save_plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.tiny_jobs import tiny_job
from megatron_lynx.timeline import Timeline, write_trace
from tests.report.samples import as_if_run, run_folder, simulated
from tests.test_cli import lynx


def island_in(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text.split('<script id="island" type="application/json">')[1].split("</script>")[0])


def reported(tmp_path: Path, *what: object) -> Any:
    result = lynx("report", *what, "-o", tmp_path / "report.html")
    assert result.exit_code == 0, result.stderr
    return island_in(tmp_path / "report.html")


def tiles(island: Any) -> dict[str, tuple[float | None, float | None]]:
    return {tile["label"]: (tile["predicted"], tile["measured"]) for tile in island["tiles"]}


def test_a_plan_with_its_profile_is_simulated(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    island = reported(tmp_path, folder / "plan.yaml", "--profile", folder / "profile.yaml")
    assert [view["name"] for view in island["views"]] == ["predicted"]
    assert tiles(island)["passes"] == (simulated().step_s, None)
    assert [row["stage"] for row in island["views"][0]["rows"]] == [0, 1]
    assert island["subject"].endswith("tensor 2, pipeline 2; 3 micro-batches of 2 a step")


def test_a_plan_without_figures_is_shown_as_it_is(tmp_path: Path) -> None:
    island = reported(tmp_path, run_folder(tmp_path / "run") / "plan.yaml")
    assert island["views"] == []
    assert [stage["layers"] for stage in island["points"][0]["stages"]] == ["1-2", "3-4"]
    assert any("no figures" in note for note in island["notes"])


def test_a_comparison_is_predicted_beside_measured(tmp_path: Path) -> None:
    island = reported(tmp_path, run_folder(tmp_path / "run"))
    assert [view["name"] for view in island["views"]] == ["predicted", "measured"]
    predicted_s, measured_s = tiles(island)["passes"]
    assert predicted_s == simulated().step_s
    assert measured_s == pytest.approx(as_if_run().seconds)
    assert [row["label"] for row in island["views"][1]["rows"]] == [f"stage {rank // 2}, rank {rank}" for rank in range(4)]
    assert island["tables"][0]["id"] == "stages"
    assert island["verdict"].startswith("ours in windows")


def test_a_job_is_planned_for_several_budgets(tmp_path: Path) -> None:
    island = reported(tmp_path, "jobs/llama3-8b-h800-80g", "--budgets", 3)
    assert [point["label"] for point in island["points"] if point["by"] == "stock"] == [
        "stock none",
        "stock selective",
        "stock full",
    ]
    assert [point["shown"] for point in island["points"]].count(True) == 1
    assert island["title"] == "jobs/llama3-8b-h800-80g"
    assert island["capacity_bytes"] > max(sum(stage["memory_bytes"].values()) for stage in island["points"][0]["stages"])


def test_what_simulate_wrote_is_drawn(tmp_path: Path) -> None:
    simulation = simulated()
    memory = {stage: simulation.memory(stage) for stage in (0, 1)}
    write_trace(simulation.timeline(), tmp_path / "trace.json", "stage", memory)
    island = reported(tmp_path, tmp_path / "trace.json")
    assert [row["label"] for row in island["views"][0]["rows"]] == ["stage 0", "stage 1"]
    assert max(island["views"][0]["rows"][0]["memory"]["kinds"]["kept"]) == memory[0].peak_bytes


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
    assert "trace.json: found no plan beside it, needed the plan under which it ran; name that plan as well" in said
    assert "measurement.json: found no plan beside it" in refused(tmp_path, folder / "measurement.json", folder / "profile.yaml")


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
    assert "ranks: found 0-2, needed a multiple of 4 (tensor 2 x pipeline 2), counted from 0" in refused(tmp_path, folder, three)
    turned = other_trace(tmp_path, Timeline({rank: run.ranks[3 - rank] for rank in range(4)}))
    said = refused(tmp_path, folder, turned)
    assert "rank 0: found layers 3-4, needed layers 1-2, which stage 0 owns" in said
    save_plan(uniform_plan(tiny_job("llama", tensor=2, pipeline=2, microbatches=2)), folder / "plan.yaml")
    (folder / "profile.yaml").unlink()
    said = refused(tmp_path, folder, other_trace(tmp_path, run))
    assert "found 3 micro-batches in one step, needed at most 2, as in the plan" in said


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
