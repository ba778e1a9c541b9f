"""What the doctor finds in variables, in a machine's files and in launches."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_lynx import doctor
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.doctor import Finding, environment, hardware_queues, launch, machine, software
from megatron_lynx.launch_arguments import read_launch


def levels(found: list[Finding]) -> dict[str, str]:
    return {finding.topic: finding.level for finding in found}


def of_launch(text: str) -> dict[str, str]:
    return levels(list(launch(read_launch(shlex.split(text)))))


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
    assert "forward_step" in found.state


TENSOR, CONTEXT = "--tensor-model-parallel-size 8", "--context-parallel-size 2"
H800, B200 = ["NVIDIA H800"], ["NVIDIA B200"]


@pytest.mark.parametrize(
    ("value", "flags", "gpus", "level"),
    [
        ("1", TENSOR, H800, "note"),
        ("1", CONTEXT, H800, "note"),
        ("8", TENSOR, [], "good"),
        ("1", "", H800, "slows"),
        (None, "", H800, "good"),
        ("1", TENSOR, B200, "slows"),
        ("32", TENSOR, ["NVIDIA GB200"], "good"),
    ],
)
def test_hardware_queues(value: str | None, flags: str, gpus: list[str], level: str) -> None:
    assert queues_of(value, flags, gpus).level == level


def test_hardware_queues_without_a_launch() -> None:
    found = [queues_of(value, None, gpus).level for value, gpus in (("1", H800), ("1", B200), (None, H800))]
    assert found == ["note", "slows", "good"]


def queues_of(value: str | None, flags: str | None, gpus: list[str]) -> Finding:
    variables = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    given = None if flags is None else read_launch(shlex.split(f"--num-layers 8 {flags}")).given
    [found] = hardware_queues(variables, given, gpus)
    return found


def test_variables_that_make_the_host_wait() -> None:
    found = levels(list(environment({"CUDA_LAUNCH_BLOCKING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"})))
    assert found["CUDA_LAUNCH_BLOCKING"] == found["TORCH_NCCL_BLOCKING_WAIT"] == "defeats"
    assert environment_of("expandable_segments:True") == "good"
    assert environment_of("max_split_size_mb:512") == "note"


@pytest.mark.parametrize("connections", ["1", "8"])
def test_times_behind_collectives_hold_up_one_queue(connections: str) -> None:
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_NCCL_DESYNC_DEBUG": "0"}
    found = levels(list(hardware_queues(variables, None, [])))
    assert found.get("TORCH_NCCL_ENABLE_TIMING") == ("defeats" if connections == "1" else None)
    assert "TORCH_NCCL_DESYNC_DEBUG" not in found


def environment_of(allocator: str) -> str:
    return levels(list(environment({"PYTORCH_CUDA_ALLOC_CONF": allocator})))["PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.parametrize(("torch", "todo"), [("2.10.0", "leave it so"), ("2.11.0", "set expandable_segments:True")])
def test_growing_segments_are_not_advised_where_megatron_raises(torch: str, todo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": torch, "megatron-core": "0.19.2"}
    monkeypatch.setattr(doctor, "version_of", lambda *names: versions.get(names[0]))
    (finding, *_) = environment({}, nccl_ub=True)
    assert finding.todo.startswith(todo)


def test_two_sockets_and_a_container(tmp_path: Path) -> None:
    for node in ("node0", "node1"):
        (tmp_path / "sys/devices/system/node" / node).mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 1073741824 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2**33}\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("0\n")
    found = {finding.topic: finding for finding in machine(["torchrun", "--numa-binding=node"], tmp_path)}
    assert (found["NUMA"].level, found["host memory"].level) == ("good", "note")
    assert found["host memory"].state.startswith("8.00 GiB")


@pytest.mark.parametrize(
    ("flags", "topic"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "windows"),
        ("--num-layers 4", "windows"),
    ],
)
def test_what_defeats_overlap(flags: str, topic: str) -> None:
    assert of_launch(flags)[topic] == "defeats"


def test_a_mistyped_flag_is_named() -> None:
    assert of_launch("--tensor-model-parallel-size 2 --num-layer 8 --use-mpi")["unknown flags"] == "note"


def test_userbuffers_leave_the_windows_of_a_pipeline() -> None:
    found = of_launch(
        "--num-layers 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"
    )
    assert (found["userbuffers"], found["windows"]) == ("note", "good")


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap"])
def test_exchanges_of_experts_are_windows_too(flags: str) -> None:
    """It was said that nothing can be hidden, of launches whose plans hide recomputation in `bwd.mlp.0`."""
    assert of_launch(f"--num-layers 8 --num-experts 8 --expert-model-parallel-size 4 {flags}")["windows"] == "good"


def test_a_sound_launch_has_nothing_that_defeats_overlap() -> None:
    assert "defeats" not in of_launch("--tensor-model-parallel-size 2 --sequence-parallel --cuda-graph-impl none").values()


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("--bf16", "note"),
        ("--bf16 --no-check-for-nan-in-loss-and-grad", "good"),
        ("--fp16", "good"),
        ("--fp16 --loss-scale 1024", "note"),
    ],
)
def test_reads_of_the_loss(flags: str, level: str) -> None:
    assert of_launch(flags)["check for NaN"] == level


def test_messages_between_stages() -> None:
    plain = launch(read_launch(shlex.split("--num-layers 8 --pipeline-model-parallel-size 4")))
    [synchronised] = [finding for finding in plain if finding.topic == "batch_p2p_sync"]
    assert "copies to the host that were asked for before it are waited for" in synchronised.costs
    assert of_launch("--num-layers 8 --pipeline-model-parallel-size 4")["batch_p2p_sync"] == "slows"
    chunks = "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
    assert of_launch(chunks)["messages between stages"] == "good"
    assert of_launch(f"{chunks} --no-overlap-p2p-communication")["batch_p2p_sync"] == "slows"


def test_a_launch_for_a_cluster_is_judged_by_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laptop's own memory was reported."""
    monkeypatch.setattr(doctor, "gpus", list)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    words = shlex.split("--num-layers 8 --tensor-model-parallel-size 2")
    for cluster, level in (("h100-80g", "note"), ("b200-180g", "slows")):
        node = load_cluster(cluster, "--cluster").node
        found = {each.topic: each for each in doctor.findings(words, cluster=cluster)}
        assert found["host memory"].state.startswith(f"{node.host_memory_gib:g} GiB on each node, which {cluster}")
        assert found["CUDA_DEVICE_MAX_CONNECTIONS"].level == level
