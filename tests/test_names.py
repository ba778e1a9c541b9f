"""Names of clusters, models and jobs on a command line, and plans that know what they were made of."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.config.loader import bundled_configs, job_path, load_cluster, load_model
from megatron_lynx.errors import ConfigError
from megatron_lynx.plan import load_plan
from megatron_lynx.plan.facts import without_options
from tests.profiler.made_up import made_up_profile
from tests.test_cli import lynx
from tests.test_inputs import LAUNCH


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("h100", "h100-80g"),
        ("H100-80G", "h100-80g"),
        ("clusters/H200", "h200-141g"),
        ("a100-80g", "a100-80g"),
        ("GB2", "gb200-nvl72"),
    ],
)
def test_a_cluster_is_named_by_its_beginning_in_any_case(written: str, meant: str) -> None:
    assert load_cluster(written, "--cluster") == load_cluster(meant, "--cluster")


def test_a_beginning_of_several_names_is_not_clear() -> None:
    with pytest.raises(
        ConfigError, match=r"with which 3 names begin, needed a path, or one of a100-40g, a100-80g, a100-80g-pcie$"
    ):
        load_cluster("a100", "--cluster")
    with pytest.raises(ConfigError, match=r"found no file 'llma3-8b', needed a path, or one of .*; did you mean llama3-8b\?$"):
        load_model("llma3-8b", "--model")
    assert job_path("DEMO") == job_path("jobs/demo")


def test_a_misspelt_beginning_of_a_cluster_is_recognised() -> None:
    with pytest.raises(ConfigError, match=r"found no file 'h101', .*; did you mean h100\?$"):
        load_cluster("h101", "--cluster")


def test_a_file_of_another_kind_is_one_problem() -> None:
    """`explain` of a cluster once listed 45 unknown and missing keys."""
    cluster = bundled_configs() / "clusters" / "h100-80g.yaml"
    with pytest.raises(ConfigError, match="is not a plan") as refused:
        load_plan(cluster)
    (problem,) = refused.value.problems
    assert "found the keys name, device, memory_gib" in str(problem)
    assert "needed those of a plan: version, model" in str(problem)


def test_a_doctor_is_asked_about_a_cluster_that_exists() -> None:
    done = lynx("doctor", "--cluster", "nowhere")
    assert done.exit_code == 2
    assert "--cluster: found no file 'nowhere'" in done.stderr


def estimated(*arguments: object) -> tuple[dict[str, Any], str]:
    done = lynx("estimate", *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout), done.stderr


def test_a_catalogued_model_is_estimated_without_a_file() -> None:
    """In a layout that is told, and the same as its job's."""
    answer, said = estimated("--model", "llama3-70b", "--gpus", 64, "--cluster", "h100")
    assert answer["fits"]
    assert "t8 c1 p2 d4, SP, micro-batch 1, none: the smallest layout that fits" in said
    assert "batches of 512 sequences of 8192 tokens" in said
    half, _ = estimated("--model", "models/LLAMA3-70B", "--gpus", 64, "--cluster", "h100", "--memory-gib", 50)
    assert half["stages"] != answer["stages"]


def test_a_model_needs_a_place() -> None:
    done = lynx("estimate", "--model", "llama3-70b", "--", "torchrun", "x.py")
    assert done.exit_code == 2
    for problem in ("--model: found also 'torchrun'", "--cluster: found nothing", "--gpus: found nothing"):
        assert problem in done.stderr


@pytest.mark.parametrize(
    "of", [("--cluster", "h100", "--", *shlex.split(LAUNCH)), ("--model", "llama3-8b", "--gpus", "8", "--cluster", "h100")]
)
def test_a_plan_knows_what_it_was_made_of(of: tuple[str, ...], tmp_path: Path) -> None:
    """`simulate` and `report` wanted its job again, which a launch has not."""
    plan = tmp_path / "plan.yaml"
    made = lynx("plan", "-o", plan, "--memory-share", 0.9, "--whole-weight-gradients", "--json", *of)
    assert made.exit_code == 0, made.output
    simulated = lynx("simulate", plan, "--json")
    assert simulated.exit_code == 0, simulated.output
    assert "warning" not in simulated.stderr
    assert json.loads(simulated.stdout)["passes_s"] == pytest.approx(load_plan(plan).stages[0].predicted.step_s)
    reported = lynx("report", plan, "-o", tmp_path / "report.html", "--budgets", 0)
    assert reported.exit_code == 0, reported.output


def test_a_plan_whose_job_has_changed_says_so(tmp_path: Path) -> None:
    job, plan = tmp_path / "job.yaml", tmp_path / "plan.yaml"
    job.write_text(job_path("jobs/llama3-8b-a100-80g").read_text())
    assert lynx("plan", job, "-o", plan).exit_code == 0
    job.write_text(job.read_text().replace("global: 128", "global: 256"))
    assert "is another job now than when the plan was made" in lynx("simulate", plan).stderr
    job.unlink()
    gone = lynx("simulate", plan)
    assert (gone.exit_code, "job.yaml: found no file" in gone.stderr) == (2, True)


def test_options_are_left_out_of_what_was_asked() -> None:
    asked = "--cluster h100-80g --memory-gib 70 --from-run a.json -- torchrun x.py --memory-gib 3"
    assert without_options(asked, "--memory-gib", "--from-run") == "--cluster h100-80g -- torchrun x.py --memory-gib 3"


def test_a_plan_for_the_testbed_keeps_its_profile_and_is_launched_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured was thrown away, and the launch line was one for GPUs."""
    monkeypatch.setattr("megatron_lynx.cli.inputs.hosts_of", lambda job: None)
    monkeypatch.setattr("megatron_lynx.cli.inputs.measured_here", lambda job, hosts: made_up_profile(job))
    words = LAUNCH.replace("--bf16", "--transformer-impl local").replace("--nproc-per-node 8", "--nproc-per-node 4").split()
    plan = tmp_path / "tiny.yaml"
    made = lynx("plan", "--cluster", "testbed", "-o", plan, "--", *words)
    assert made.exit_code == 0, made.output
    assert " -m tests.instruments pretrain_gpt.py " in made.stdout
    assert (tmp_path / "tiny.profile.yaml").is_file()
    assert lynx("simulate", plan).exit_code == 0


def test_an_option_of_ours_in_a_launch_is_pointed_out(tmp_path: Path) -> None:
    """It was taken for a flag of the script's own."""
    done = lynx("estimate", "--cluster", "h100", "--", *LAUNCH.split(), "--memory-gib", 60, "--own-flag", 3)
    assert done.exit_code == 0, done.output
    assert "warning: --memory-gib is an option of megatron-lynx, and was not read: give it before --" in done.stderr
    assert "--own-flag is an option" not in done.stderr


def test_a_gpu_whose_name_begins_anothers_is_found() -> None:
    assert load_cluster("h20", "--cluster").name == "h20-96g"
    assert load_cluster("h200", "--cluster").name == "h200-141g"
