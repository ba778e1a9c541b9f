"""What the doctor finds in variables, in a machine's files and in launches."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_lynx.doctor.environment import environment
from megatron_lynx.doctor.finding import Finding
from megatron_lynx.doctor.launch import launch
from megatron_lynx.doctor.machine import machine
from megatron_lynx.doctor.software import software
from megatron_lynx.launch_arguments import read_launch


def levels(found: list[Finding]) -> dict[str, str]:
    return {finding.topic: finding.level for finding in found}


def of_launch(text: str) -> dict[str, str]:
    return levels(list(launch(read_launch(shlex.split(text)), {})))


def test_this_machines_software_trains() -> None:
    found = levels(list(software()))
    assert found["torch"] == found["megatron-core"] == found["hooks"] == "good"


def test_a_function_that_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import schedules

    def moved() -> None:
        """Not as recorded."""

    monkeypatch.setattr(schedules, "forward_step", moved)
    found = next(finding for finding in software() if finding.topic == "hooks")
    assert found.level == "defeats"
    assert "forward_step" in found.found


@pytest.mark.parametrize(
    ("value", "tensor", "gpu", "level"),
    [
        ("1", 8, "NVIDIA H800", "note"),
        (None, 8, "NVIDIA H800", "slows"),
        ("1", 1, "NVIDIA H800", "slows"),
        (None, 1, "NVIDIA H800", "good"),
        ("1", 8, "NVIDIA B200", "slows"),
        ("32", 8, "NVIDIA GB200", "good"),
    ],
)
def test_hardware_queues(value: str | None, tensor: int, gpu: str, level: str) -> None:
    variables = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    assert levels(list(environment(variables, tensor=tensor, gpus=[gpu])))["CUDA_DEVICE_MAX_CONNECTIONS"] == level


def test_variables_that_make_the_host_wait() -> None:
    found = levels(list(environment({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}, tensor=2, gpus=[])))
    assert found["CUDA_LAUNCH_BLOCKING"] == found["TORCH_NCCL_BLOCKING_WAIT"] == "defeats"
    assert environment_of("expandable_segments:True") == "good"
    assert environment_of("max_split_size_mb:512") == "note"


def environment_of(allocator: str) -> str:
    return levels(list(environment({"PYTORCH_CUDA_ALLOC_CONF": allocator}, tensor=2, gpus=[])))["PYTORCH_CUDA_ALLOC_CONF"]


def test_two_sockets_and_a_container(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1073741824 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2**33}\n")
    found = {finding.topic: finding for finding in machine(["torchrun", "--numa-binding=node"], tmp_path)}
    assert (found["NUMA"].level, found["host memory"].level) == ("good", "note")
    assert found["host memory"].found.startswith("8.00 GiB")


@pytest.mark.parametrize(
    ("flags", "topic"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "userbuffers"),
        ("--tensor-model-parallel-size 2 --cuda-graph-impl local", "CUDA graphs"),
        ("--tensor-model-parallel-size 2 --overlap-moe-expert-parallel-comm", "expert-parallel overlap"),
        ("--tensor-model-parallel-size 2 --recompute-activations", "stock recomputation"),
        ("--tensor-model-parallel-size 2 --fine-grained-activation-offloading", "stock offloading"),
        ("--num-layers 4", "windows"),
    ],
)
def test_what_defeats_overlap(flags: str, topic: str) -> None:
    assert of_launch(flags)[topic] == "defeats"


def test_a_sound_launch_has_nothing_that_defeats_overlap() -> None:
    assert "defeats" not in of_launch("--tensor-model-parallel-size 2 --sequence-parallel --cuda-graph-impl none").values()


def test_messages_between_stages() -> None:
    plain = launch(read_launch(shlex.split("--num-layers 8 --pipeline-model-parallel-size 4")), {})
    [synchronised] = [finding for finding in plain if finding.topic == "batch_p2p_sync"]
    assert "copies to the host that were asked for before it are waited for" in synchronised.costs
    assert of_launch("--num-layers 8 --pipeline-model-parallel-size 4")["batch_p2p_sync"] == "slows"
    chunks = "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
    assert of_launch(chunks)["messages between stages"] == "good"
    assert of_launch(f"{chunks} --no-overlap-p2p-communication")["batch_p2p_sync"] == "slows"
