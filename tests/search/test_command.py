"""`megatron-lynx search`: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_lynx.cli import app
from megatron_lynx.config import Job, Parallel, load_job
from megatron_lynx.units import format_bytes
from megatron_lynx.yaml_file import write_yaml
from tests.search.jobs import small_job, with_budget


def run(*arguments: object):
    return CliRunner().invoke(app, ["search", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    job = with_budget(small_job(seq=4096, layers=16), 24.0)
    path.write_text(write_yaml(job.model_dump(mode="json", by_alias=True, exclude_none=True)))
    return path


def test_json_has_the_form_of_the_design(job_file: Path) -> None:
    result = run(job_file, "--gpus", 8, "--top", 4, "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 0
    assert [line.split(" of ")[0] for line in result.stderr.splitlines()] == ["seconds assume 8 NICs", "published steps"]
    assert {"candidates", "considered", "seconds"} <= answer.keys()
    assert len(answer["candidates"]) == 4
    asked = {"parallel", "policy", "offload_ratio", "step_s", "tokens_per_s", "memory_bytes"}
    for candidate in answer["candidates"]:
        assert asked <= candidate.keys()
        assert candidate["tokens_per_s"] == pytest.approx(8 * 4096 / candidate["step_s"])
        assert candidate["memory_bytes"] <= answer["budget_bytes"]
        Parallel.model_validate(candidate["parallel"])


def test_a_candidate_can_be_put_into_a_job(job_file: Path) -> None:
    best = json.loads(run(job_file, "--gpus", 8, "--policies", "selective,full", "--json").stdout)["candidates"][0]
    keys = ("parallel", "batch", "policy", "offload_ratio")
    data = {**load_job(job_file).model_dump(by_alias=True), "gpus": 8, **{key: best[key] for key in keys}}
    assert Job.model_validate(data).replicas == best["replicas"]


def test_tables_are_for_people(job_file: Path) -> None:
    result = run(job_file, "--gpus", 8, "--top", 2)
    assert "tokens/s" in result.stdout
    assert [line.split(" of ")[0] for line in result.stderr.splitlines()] == ["seconds assume 8 NICs", "published steps"]


def test_without_offloading_nothing_is_offloaded(job_file: Path) -> None:
    answer = json.loads(run(job_file, "--gpus", 8, "--no-offload", "--json").stdout)
    assert {candidate["offload_ratio"] for candidate in answer["candidates"]} == {0.0}


def test_the_answer_no_is_status_1(job_file: Path) -> None:
    result = run(job_file, "--gpus", 1, "--policies", "none", "--no-offload")
    assert result.exit_code == 1
    assert "nothing fits on 1 device: the closest is t1 c1 p1 d1" in result.stderr
    assert "stage 0" in result.stderr
    assert "--gpus: found 1, needed" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("number", ["nan", "1e400", "8.5", "eight", ""])
def test_what_is_no_number_of_devices(job_file: Path, number: str) -> None:
    assert run(job_file, "--gpus", number).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "0"], "found 0, needed 1 to"),
        (["--gpus", "7"], "the nearest that do: "),
        (["--gpus", "8", "--policies", "ful"], "did you mean full?"),
        (["--gpus", "8", "--policies", ","], "--policies"),
        (["--gpus", "8", "--top", "0"], "at least 1"),
    ],
)
def test_wrong_requests_are_status_2(job_file: Path, arguments: list[str], said: str) -> None:
    result = run(job_file, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_jobs_and_undescribed_clusters() -> None:
    missing, testbed = run("jobs/lama-65b", "--gpus", 8), run("jobs/demo", "--gpus", 8)
    assert (missing.exit_code, testbed.exit_code) == (2, 2)
    assert "did you mean llama-65b?" in missing.stderr
    assert "matmul" in testbed.stderr


def test_a_winner_is_held_against_its_own_layouts_budget(tmp_path: Path) -> None:
    """`73.20 GiB each` stood above a winner of 73.32: what a layout leaves depends on its NCCL groups."""
    (tmp_path / "job.yaml").write_text(
        "model: {like: models/llama3-8b, implementation: transformer_engine}\ncluster: clusters/h100-80g\ngpus: 8\n"
        "parallel: {tensor: 2, sequence_parallel: true, distributed_optimizer: true}\n"
        "batch: {micro: 1, global: 64}\npolicy: none\n"
    )
    asked = (tmp_path / "job.yaml", "--gpus", 8, "--policies", "none,full", "--top", 4)
    candidates = json.loads(run(*asked, "--json").stdout)["candidates"]
    assert all(each["memory_bytes"] <= each["budget_bytes"] for each in candidates)
    assert len({each["budget_bytes"] for each in candidates}) > 1
    shown = run(*asked).stdout
    assert all(format_bytes(each["budget_bytes"]) in shown for each in candidates)
    assert " each" not in shown.splitlines()[0]
