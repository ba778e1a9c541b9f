"""The command line: what it answers, and how it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from megatron_lynx.cli import app
from megatron_lynx.config import Job, load_job
from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.plan import Plan, load_plan, save_plan
from megatron_lynx.profiler.profile import load_profile
from megatron_lynx.testbed.comparison import Comparison
from megatron_lynx.testbed.fusions import deferring_job
from megatron_lynx.timeline import Timeline
from megatron_lynx.version import __version__
from megatron_lynx.yaml_file import write_yaml
from tests.measure.samples import measurement, setting
from tests.nursery import process as nursery
from tests.plan.test_plan_file import small_plan
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan


def lynx(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_version() -> None:
    assert lynx("--version").stdout == f"{__version__}\n"


def test_explain_says_what_happens_where(tmp_path: Path) -> None:
    data = small_plan()
    first = data["stages"][0]
    ahead, on_demand = first["rules"][0] | {"layers": 2}, first["rules"][0] | {"layers": 1}
    first["rules"] = [ahead | {"windows": {"mlp": "pipe.recv_backward"}}, on_demand]
    first |= {"ahead_depth": 1, "predicted": {"step_s": 1.25, "resident_activation_bytes": 2**21}}
    (tmp_path / "plan.yaml").write_text(write_yaml(data))
    result = lynx("explain", "--all", tmp_path / "plan.yaml")
    assert result.exit_code == 0, result.output
    for text in (
        "stage 0: layers 1-2",
        "pipe.recv_backward",
        "linear_fc2",
        "on_demand",
        "step 1.25 s",
        "2.00 MiB",
        "nothing is stated",
    ):
        assert text in result.stdout
    answer = lynx("explain", tmp_path / "plan.yaml", "--json").stdout
    assert json.loads(answer) == load_plan(tmp_path / "plan.yaml").model_dump(mode="json", exclude_none=True)


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        (None, ["no such file"]),
        ("", ["an empty file"]),
        ("version: 1\nversion: 1\n", ["plan.yaml:2: found 'version' a second time"]),
        ("version: 9\n", ["found 9, needed 1; upgrade"]),
        ("version: 1\nstages: [{stage: 0,\n", ["plan.yaml:3: "]),
        ("version: 1\ncolour: '[bold]'\n", ["colour: found an unknown key", "model: found nothing", "stages: found nothing"]),
    ],
)
def test_a_wrong_plan_ends_with_status_2_and_no_traceback(tmp_path: Path, text: str | None, answers: list[str]) -> None:
    path = tmp_path / "plan.yaml"
    if text is not None:
        path.write_text(text)
    result = lynx("explain", path, "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert all(answer in result.stderr for answer in answers), result.stderr


def test_a_mistyped_command_is_a_wrong_request() -> None:
    assert lynx("explian", "plan.yaml").exit_code == 2


def job_file(folder: Path, job: Job) -> Path:
    path = folder / "job.yaml"
    path.write_text(write_yaml(job.model_dump(mode="json", by_alias=True)))
    return path


def plan_file(folder: Path, plan: Plan) -> Path:
    save_plan(plan, folder / "plan.yaml")
    return folder / "plan.yaml"


SMALL = tiny_job("llama", tensor=2, microbatches=1, micro=1, layers=2)


def test_from_a_job_to_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three commands of `make demo`, on a job of seconds. Its weight gradients may be deferred, as the demo's."""
    monkeypatch.setattr("megatron_lynx.testbed.profiling.HOST_ROUNDS", 1)
    job = job_file(tmp_path, deferring_job(SMALL))
    profile, plan, folder = tmp_path / "new" / "profile.yaml", tmp_path / "plan.yaml", tmp_path / "out"
    shown = lynx("profile", job, "-o", profile).stdout
    assert "AdamW      on the host: " in shown
    assert re.search(r"links      measured: all_reduce [\d.e-]+ GB/s; ranks talk over this\s+machine's loopback", shown)
    adam = load_profile(profile).host_time.adam
    assert adam.alone_million_per_s >= adam.together_million_per_s > 0
    summary = json.loads(lynx("plan", job, "--profile", profile, "-o", plan, "--json").stdout)
    assert [stage["layers"] for stage in summary["stages"]] == ["1-2"]
    result = lynx("compare", job, "--plan", plan, "-o", folder, "--rounds", 1, "--steps-warmup", 0, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["setting"] for row in rows[:3]] == ["stock none", "stock selective", "stock full"]
    assert [row["gradients_equal"] for row in rows] == [None, *[True] * (len(rows) - 1)]
    assert "loopback" in result.stderr
    written = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert written.keys() == {"measurement.json", "report.html", "trace.json"}
    assert all(written.values())


def test_compare_says_no_where_gradients_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def differing(*_: Any, **__: Any) -> Comparison:
        ours = setting("ours", 1.0, 1, 1, ours=True, gradients_equal=False)
        none = setting("stock none", 1.0, 2, 2, gradients_equal=None)
        return Comparison(measurement(settings=(none, ours)), Timeline({0: (), 1: ()}))

    monkeypatch.setattr("megatron_lynx.testbed.comparison.compare", differing)
    result = lynx(
        "compare", job_file(tmp_path, SMALL), "--plan", plan_file(tmp_path, uniform_plan(SMALL)), "-o", tmp_path / "out"
    )
    assert result.exit_code == 1
    assert "differ" in result.stderr
    assert (tmp_path / "out" / "measurement.json").exists()


def test_wrong_requests_end_with_status_2_before_anything_runs(tmp_path: Path) -> None:
    job, other = job_file(tmp_path, SMALL), plan_file(tmp_path, uniform_plan(tiny_job("llama", tensor=2, layers=4, hidden=64)))
    (tmp_path / "file").write_text("")
    for answers, arguments in (
        (["jobs/demoo", "did you mean demo"], ("compare", "jobs/demoo")),
        (["no such file"], ("compare", job, "--plan", tmp_path / "none.yaml", "-o", tmp_path)),
        (["model.layers", "model.hidden", "batch.micro"], ("compare", job, "--plan", other, "-o", tmp_path)),
        (["'--rounds'"], ("compare", job, "--rounds", 0)),
        (["cannot be used"], ("compare", job, "-o", tmp_path / "file")),
        (["no such file"], ("plan", job, "--profile", tmp_path / "none.yaml", "-o", tmp_path / "p.yaml")),
        (["could not be written"], ("profile", job, "-o", tmp_path / "file" / "p.yaml")),
        (["found a folder"], ("profile", job, "-o", tmp_path)),
        (["a file that is read"], ("profile", job, "-o", job)),
        (["a file that is read"], ("plan", "jobs/llama-65b", "--profile", job, "-o", job)),
        (["a file that is read"], ("simulate", other, "--trace", other)),
    ):
        result = lynx(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert all(answer in result.stderr for answer in answers), result.stderr


def test_a_plan_of_another_schedule_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    flushing = tiny_job("llama", pipeline=2, layers=2, microbatches=4)
    job = job_file(tmp_path, Job.model_validate({**flushing.model_dump(by_alias=True), "schedule": "double_buffered"}))
    result = lynx("compare", job, "--plan", plan_file(tmp_path, uniform_plan(flushing)), "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "schedule: found flush, needed double_buffered" in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_hooks_are_as_recorded() -> None:
    """In a process of its own: Megatron is imported as a user's machine has it, without the stand-in."""
    done = nursery.run("megatron_lynx", "hooks", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["hooks"]
    hooks = {"halves", "sites", "collectives", "random_state", "steps", "double_buffered", "experts", "latent"}
    hooks |= {"head_in_pieces", "delta"}
    assert {row["hook"] for row in rows} == hooks
    assert all(row["as_recorded"] for row in rows)


def test_thousands_of_problems_are_counted_not_told(tmp_path: Path) -> None:
    """A file of 60 000 stages once kept its reader waiting for minutes."""
    path = tmp_path / "plan.yaml"
    path.write_text("stages:\n" + "".join(f"  - {{stage: {stage}}}\n" for stage in range(2000)))
    result = lynx("explain", path)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 102
    assert result.stderr.endswith("  - and 5905 more\n")


def test_a_name_too_long_for_a_file_is_not_blamed_on_the_output(tmp_path: Path) -> None:
    """It once was: standard output cannot be written, file name too long."""
    name = "x" * 300
    for arguments, answer in (
        (("estimate", name), f"found no file '{name}'"),
        (("explain", name), "found file name too long"),
        (("plan", "jobs/llama-65b", "-o", tmp_path / name), "found file name too long, needed a file that can be written"),
    ):
        result = lynx(*arguments)
        assert result.exit_code == 2, result.output
        assert answer in result.stderr


def test_characters_that_the_terminal_has_not(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(write_yaml({**small_plan(), "provenance": {"made_by": "Käthe → 猫"}}), encoding="utf-8")
    done = run_cli("explain", plan, stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert r"K\xe4the" in done.stdout


def test_an_output_that_nobody_reads_any_more_is_no_answer() -> None:
    """`estimate ... | head -1` once ended with 1, which is the answer no."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run_cli("explain", bundled_configs() / "plans" / "llama-7b-a100-80g.yaml", stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def run_cli(*arguments: object, stdout: Any, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    command = [sys.executable, "-m", "megatron_lynx", *map(str, arguments)]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, env=env, text=True, timeout=300, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a file that is always full")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_an_answer_that_cannot_be_written_is_an_error_without_a_traceback(form: list[str]) -> None:
    plan = bundled_configs() / "plans" / "llama-7b-a100-80g.yaml"
    with open("/dev/full", "w") as full:
        done = run_cli("explain", plan, *form, stdout=full)
    assert done.returncode == 2
    assert done.stderr == "standard output cannot be written: no space left on device\n"


def test_compare_simulates_stocks_strongest_settings_beside_a_plan(tmp_path: Path) -> None:
    """The GPUs need not be here: nothing runs."""
    result = lynx("compare", "jobs/llama-65b-h800-80g", "--simulate", "-o", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["setting"] for row in rows[:2]] == ["stock none", "stock full"]
    *others, ours = rows
    assert (ours["setting"], ours["ours"]) == ("ours", True)
    rivals = others[2:]
    assert rivals
    may_use = load_job("jobs/llama-65b-h800-80g").memory_budget_bytes
    assert all(row["device_bytes"] <= may_use for row in rivals)
    assert all(row["flags"] for row in rivals)
    assert all(one["step_s"] <= other["step_s"] for one, other in pairwise(rivals))
    assert ours["step_s"] < rivals[0]["step_s"]
