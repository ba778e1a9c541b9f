"""`megatron-lynx plan` for clusters that are not here: what it says of the launch, and where its seconds are from."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_lynx.cli.inputs import command_with
from megatron_lynx.cli.options import Subject
from megatron_lynx.config import load_job
from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.plan import load_plan
from megatron_lynx.planner.summary import job_environment
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import save_profile
from tests.test_cli import lynx

pytestmark = pytest.mark.slow

JOB = "jobs/llama3-8b-a100-80g"


def planned(folder: Path, *options: object) -> dict[str, object]:
    result = lynx("plan", JOB, "-o", folder / "plan.yaml", "--json", *options)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_cluster_with_figures_is_planned_without_measuring(tmp_path: Path) -> None:
    answer = planned(tmp_path)
    assert answer["partition"] == [len(stage.layers) for stage in load_plan(tmp_path / "plan.yaml").stages] == [17, 15]
    assert "--decoder-last-pipeline-num-layers 15" in answer["launch_flags"]
    assert [stage["memory_bytes"]["total"] for stage in answer["stages"]] == [
        stage["predicted"]["memory_bytes"] for stage in answer["stages"]
    ]
    shown = lynx("explain", "--all", tmp_path / "plan.yaml").stdout
    assert answer["launch_flags"][-2:] == ["--use-distributed-optimizer", "--global-batch-size 128"]
    for flag in answer["launch_flags"][:-2]:
        assert f"{flag} \\\n" in shown or f"{flag}\n" in shown
    assert "(--global-batch-size is 32 x the data-parallel size)" in shown
    assert "whole device 64." in " ".join(shown.split())


def test_a_plan_says_how_it_was_asked_for(tmp_path: Path) -> None:
    """`simulate` and `report` read the job from there; a run that runs out of memory says the same words, with less memory."""
    planned(tmp_path, "--memory-gib", 70)
    provenance = load_plan(tmp_path / "plan.yaml").provenance
    assert provenance.asked == f"--memory-gib 70 {JOB}"
    asked = Subject(words=["torchrun", "a b.py"], cluster="h100-80g", gpus=8)
    assert asked.again({}) == "--cluster h100-80g --gpus 8 -- torchrun 'a b.py'"


def test_layers_measured_on_one_gpu_plan_a_cluster(tmp_path: Path) -> None:
    """They have no links; the cluster's figures give them."""
    job = load_job(JOB)
    measured = analytic_profile(job).model_copy(update={"links": ()})
    save_profile(measured, tmp_path / "profile.yaml")
    assert planned(tmp_path, "--profile", tmp_path / "profile.yaml")["step_s"] == planned(tmp_path)["step_s"]
    other = measured.model_copy(update={"shape": measured.shape.model_copy(update={"tensor": 8})})
    save_profile(other, tmp_path / "profile.yaml")
    refused = lynx("plan", JOB, "--profile", tmp_path / "profile.yaml", "-o", tmp_path / "plan.yaml")
    assert refused.exit_code == 2
    assert "shape.tensor: found 8, needed 1" in refused.stderr


def test_simulate_takes_a_clusters_figures_for_its_job(tmp_path: Path) -> None:
    answer = planned(tmp_path)
    result = lynx("simulate", tmp_path / "plan.yaml", "--job", JOB, "--json")
    assert json.loads(result.stdout)["step_s"] == pytest.approx(answer["step_s"])


def test_a_job_that_cannot_fit_says_no(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "configs" / f"{JOB}.yaml").read_text()
    (tmp_path / "job.yaml").write_text(text.replace("memory_gib: 64.6", "memory_gib: 30").replace("partition: auto, ", ""))
    result = lynx("plan", tmp_path / "job.yaml", "-o", tmp_path / "plan.yaml")
    assert result.exit_code == 1
    assert "memory of a device, stage 0: found at least" in result.stderr
    assert "nearest change that fits" in result.stderr
    assert not (tmp_path / "plan.yaml").exists()


def test_a_budget_that_nothing_fits_says_which_one_to_type(tmp_path: Path) -> None:
    launch = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --bf16"
    launch += " --micro-batch-size 1 --global-batch-size 64 --vocab-size 50304 --tensor-model-parallel-size 8"
    words = ["plan", "-o", tmp_path / "plan.yaml", "--cluster", "h100-80g", "--gpus", 8]
    refused = lynx(*words, "--memory-gib", 1, "--", *launch.split())
    assert refused.exit_code == 1
    (typed,) = re.findall(r"smallest budget with a plan: --memory-gib (\d+)", refused.stderr)
    assert lynx(*words, "--memory-gib", typed, "--", *launch.split()).exit_code == 0


def test_the_share_of_an_estimate_can_be_asked_for() -> None:
    sizes = []
    for ratio in ("0", "0.5", "auto"):
        result = lynx("estimate", "jobs/llama-65b", "--offload-ratio", ratio, "--json")
        sizes.append(json.loads(result.stdout)["stages"][0]["memory_bytes"]["total"])
    assert sizes[1] < sizes[2] <= sizes[0]
    wrong = lynx("estimate", "jobs/llama-65b", "--offload-ratio", "1.5")
    assert wrong.exit_code == 2
    assert "--offload-ratio" in wrong.stderr


def test_a_plan_of_a_launch_may_offload(tmp_path: Path) -> None:
    """It remembers that it was asked to, so that another round asks again."""
    launch = shlex.split(
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu "
        "--num-attention-heads 32 --disable-bias-linear --seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 1 "
        "--global-batch-size 64 --bf16 --vocab-size 32000 --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer "
        "--pipeline-model-parallel-size 8"
    )
    found = {}
    for ratio in ("0", "auto"):
        path = tmp_path / f"{ratio}.yaml"
        asked = ("plan", "--cluster", "a100-80g", "-o", path, "--memory-gib", "26", "--offload-ratio", ratio)
        result = lynx(*asked, "--", *launch)
        assert result.exit_code == 0, result.stderr
        found[ratio] = load_plan(path)
        assert ("--offload-ratio auto" in result.stdout) == (ratio == "0"), "as what could be tried"
        assert f"--offload-ratio {ratio}" in (found[ratio].provenance.asked or "")
    assert not any(entry.offload for entry in found["0"].stages)
    assert any(entry.offload for entry in found["auto"].stages)
    least = [max(entry.predicted.step_s or 0 for entry in plan.stages) for plan in found.values()]
    assert least[1] < least[0]


@pytest.mark.parametrize(
    ("job", "environment"),
    [("gpt-175b-h800-80g", {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16"}), ("llama3-70b-h800-80g", {})],
)
def test_a_plan_names_the_margin_that_its_norms_need(job: str, environment: dict[str, str]) -> None:
    """Rows of 12288 and of 8192."""
    assert job_environment(load_job(f"jobs/{job}"), load_plan(f"configs/plans/{job}.yaml")) == environment


def test_the_printed_launch_sets_that_margin() -> None:
    launch = "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --num-layers 96 --hidden-size 12288 --bf16"
    job, plan = load_job("jobs/gpt-175b-h800-80g"), load_plan("configs/plans/gpt-175b-h800-80g.yaml")
    printed = command_with(read_launch(launch.split()), job, plan, Path("plan.yaml"))
    assert printed.startswith("NVTE_FWD_LAYERNORM_SM_MARGIN=16 torchrun --nproc-per-node 8 --nnodes 8 -m megatron_lynx.launch ")
