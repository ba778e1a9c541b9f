"""Commands that are given a Megatron launch."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from megatron_lynx.plan import load_plan
from tests.test_cli import lynx

LAUNCH = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 32 --bf16 --lr 1e-4 --vocab-size 32000 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --use-distributed-optimizer"
)


def test_a_plan_for_a_launch(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    result = lynx("plan", "--cluster", "a100-80g", "--verbose", "-o", path, "--", *shlex.split(LAUNCH))
    assert result.exit_code == 0, result.output
    for text in (
        "model.ffn",
        "4 hidden: no",
        "learning rate (--lr)",
        "-m megatron_lynx.launch pretrain_gpt.py",
    ):
        assert text in result.stdout
    assert result.stdout.splitlines()[-1].endswith(f"--lynx-plan {path}")
    plan = load_plan(path)
    assert (plan.model.layers, plan.model.ffn, plan.parallel.tensor, plan.batch.microbatches) == (8, 16384, 2, 16)


def test_an_estimate_of_a_launch_as_json() -> None:
    arguments = LAUNCH.partition("pretrain_gpt.py ")[2]
    result = lynx(
        "estimate", "--cluster", "a100-80g", "--gpus", 8, "--json", "--", *shlex.split(f"{arguments} --recompute-activations")
    )
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["fits"]
    assert {"place": "policy", "value": "selective", "from": "--recompute-activations"} in answer["understood"]["facts"]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("jobs/demo", "jobs/demo"), "a second job"),
        (("jobs/demo", "--gpus", 8), "with a job file, its own figure counts"),
        (
            ("--cluster", "a100-80g", "--", "--num-layers", "8", "--multi-latent-attention", "--mla-down-proj-fusion"),
            "one linear does what two items stand for",
        ),
        (("--cluster", "a1000", "--", "--num-layers", "8"), "--cluster: found no file"),
    ],
)
def test_what_is_not_clear_is_asked(arguments: tuple[object, ...], answer: str, tmp_path: Path) -> None:
    result = lynx("plan", "-o", tmp_path / "plan.yaml", *arguments)
    assert result.exit_code == 2
    assert answer in result.stderr
    assert not (tmp_path / "plan.yaml").exists()


def test_doctor_says_what_defeats_overlap() -> None:
    launch = shlex.split(LAUNCH)
    blocking = ("CUDA_LAUNCH_BLOCKING=1", "CUDA_DEVICE_MAX_CONNECTIONS=1")
    result = lynx("doctor", "--json", "--", *blocking, *launch)
    assert result.exit_code == 1
    found = {finding["topic"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert found["CUDA_LAUNCH_BLOCKING"]["todo"] == "unset it"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"]["state"].startswith("1")
    assert lynx("doctor", "--", "CUDA_DEVICE_MAX_CONNECTIONS=1", *launch).exit_code == 0


def test_layouts_of_a_launch_do_not_depend_on_its_own() -> None:
    def best(flags: str) -> object:
        words = shlex.split(f"{LAUNCH} --vocab-size 32768 {flags}")
        result = lynx("search", "--cluster", "a100-80g", "--gpus", 16, "--top", 1, "--policies", "none", "--json", "--", *words)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["candidates"][0]

    assert best("") == best("--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --micro-batch-size 2")


def test_the_host_steps_as_much_as_the_launch_says_or_as_is_asked_for(tmp_path: Path) -> None:
    """A launch keeps its own share; asked, the plan chooses one, and the launch that is printed has it."""
    aware = (
        "--use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.75"
    )
    words = ["--cluster", "h100-80g", "-o", tmp_path / "plan.yaml"]
    kept = lynx("plan", *words, "--", *shlex.split(f"{LAUNCH} {aware}"))
    assert kept.exit_code == 0, kept.output
    assert "optimizer on the host: 0.75 of it, " in kept.stdout
    assert kept.stdout.count("--optimizer-offload-fraction 0.75") == 1
    asked = lynx("plan", *words, "--optimizer-offload", 0.5, "--", *shlex.split(f"{LAUNCH} {aware}"))
    assert asked.exit_code == 0, asked.output
    assert "optimizer on the host: 0.5 of it, " in asked.stdout
    assert "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --lynx-plan" in asked.stdout
    assert "--optimizer-offload 0.5" in load_plan(tmp_path / "plan.yaml").provenance.asked  # type: ignore[operator]
    none = lynx("plan", *words, "--optimizer-offload", 0, "--", *shlex.split(f"{LAUNCH} {aware}"))
    assert none.exit_code == 0, none.output
    assert "--use-precision-aware-optimizer --lynx-plan" in none.stdout
    assert "--optimizer-cpu-offload" not in none.stdout, "all of the optimizer is on the device"
    assert "--optimizer-offload-fraction" not in none.stdout
    refused = lynx("plan", *words, "--optimizer-offload", "auto", "--", *shlex.split(LAUNCH))
    assert refused.exit_code == 2
    assert "offload auto needs precision_aware: true (--use-precision-aware-optimizer)" in refused.stderr


def test_a_budget_of_ones_own() -> None:
    for words in (("jobs/llama-65b",), ("--cluster", "a100-80g", "--", *shlex.split(LAUNCH))):
        result = lynx("estimate", "--memory-gib", 0.5, "--json", *words)
        assert result.exit_code == 1
        assert json.loads(result.stdout)["fits"] is False
