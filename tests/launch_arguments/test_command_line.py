"""A launch taken apart, and put together again with a plan."""

from __future__ import annotations

import shlex

import pytest

from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments.command_line import command_line


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4 pretrain_gpt.py --num-layers 4", 32),
        ("python -m torch.distributed.run --nproc-per-node=4 pretrain_gpt.py --num-layers 4", 4),
        ("torchrun --nproc-per-node auto pretrain_gpt.py", None),
        ("torchrun --nproc-per-node 8 --nnodes 2:4 pretrain_gpt.py", None),
        ("srun -N 2 --ntasks-per-node 8 python -u pretrain_gpt.py --num-layers 4", 16),
        ("srun --nodes 2 torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py", 16),
        ("WORLD_SIZE=2 python pretrain_gpt.py", 2),
        ("python pretrain_gpt.py", None),
    ],
)
def test_how_many_gpus(text: str, gpus: int | None) -> None:
    command = command_line(shlex.split(text))
    assert (command.script, command.gpus) == ("pretrain_gpt.py", gpus)


def test_parts() -> None:
    command = command_line(shlex.split("env A=1 B='2 3' torchrun --nnodes 1 x/pretrain_gpt.py --spec a b.py"))
    assert command.environment == (("A", "1"), ("B", "2 3"))
    assert command.launcher == ("torchrun", "--nnodes", "1")
    assert command.arguments == ("--spec", "a", "b.py")
    assert command_line(["--num-layers", "4"]).arguments == ("--num-layers", "4")


def test_a_shell_script_is_for_the_shell() -> None:
    with pytest.raises(ConfigError, match="give the command that it runs"):
        command_line(["bash", "train.sh"])


def test_the_command_to_paste() -> None:
    text = "A=1 torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4 --split '9, 1'"
    under_plan = command_line(shlex.split(text)).under_plan("plan.yaml", ["--decoder-first-pipeline-num-layers 1"])
    assert under_plan == (
        "A=1 torchrun --nproc-per-node 8 -m megatron_lynx.launch pretrain_gpt.py --num-layers 4 --split '9, 1' "
        "--decoder-first-pipeline-num-layers 1 --lynx-plan plan.yaml"
    )
    again = command_line(shlex.split(under_plan)).under_plan("other.yaml", [])
    assert again == under_plan.replace("plan.yaml", "other.yaml"), "the launcher and the plan are there once"
    testbed = "torchrun -m tests.instruments pretrain_gpt.py"
    assert command_line(testbed.split()).under_plan("plan.yaml", []) == f"{testbed} --lynx-plan plan.yaml"
    assert command_line(["--num-layers", "4"]).under_plan("plan.yaml", []) == "add to the launch: --lynx-plan plan.yaml"


def test_a_variable_that_a_plan_needs_is_set_unless_the_launch_sets_it() -> None:
    needed = {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16"}
    launch = "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 4"
    said = command_line(launch.split()).under_plan("plan.yaml", [], needed)
    assert said.startswith("NVTE_FWD_LAYERNORM_SM_MARGIN=16 CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun ")
    own = command_line(f"NVTE_FWD_LAYERNORM_SM_MARGIN=8 {launch}".split()).under_plan("plan.yaml", [], needed)
    assert own.startswith("NVTE_FWD_LAYERNORM_SM_MARGIN=8 CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun ")
    alone = command_line(["--num-layers", "4"]).under_plan("plan.yaml", [], needed)
    assert alone == "add to the launch: --lynx-plan plan.yaml, and to its environment: NVTE_FWD_LAYERNORM_SM_MARGIN=16"
