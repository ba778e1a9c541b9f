"""What the doctor finds in variables, in a machine's files and in launches."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path

import pytest

from megatron_lynx import doctor
from megatron_lynx.config.cluster import HostTime
from megatron_lynx.config.loader import load_cluster
from megatron_lynx.doctor.environment import Finding, environment, hardware_queues, machine, software
from megatron_lynx.doctor.launch import Unmeasured, host_time, launch
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.plan import load_plan, save_plan
from megatron_lynx.planner import uniform_plan
from tests.profiler.made_up import made_up_host_time


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
    assert "forward_step" in found.state


TENSOR, CONTEXT = "--tensor-model-parallel-size 8", "--context-parallel-size 2"
H800, B200 = ["NVIDIA H800"], ["NVIDIA B200"]


@pytest.mark.parametrize(
    ("value", "flags", "gpus", "level"),
    [
        ("1", TENSOR, H800, "note"),
        (None, TENSOR, H800, "defeats"),
        ("8", TENSOR, [], "defeats"),
        ("1", "", H800, "slows"),
        (None, "", H800, "good"),
        ("1", TENSOR, B200, "slows"),
        ("32", TENSOR, ["NVIDIA GB200"], "good"),
        ("1", f"{TENSOR} --use-megatron-fsdp", H800, "defeats"),
        ("1", "--use-torch-fsdp2", B200, "defeats"),
        (None, f"{TENSOR} --use-megatron-fsdp", H800, "good"),
        ("32", f"{TENSOR} --overlap-moe-expert-parallel-comm", H800, "good"),
        ("1", f"{TENSOR} --overlap-moe-expert-parallel-comm", H800, "note"),
    ],
)
def test_hardware_queues(value: str | None, flags: str, gpus: list[str], level: str) -> None:
    assert queues_of(value, flags, gpus).level == level


def test_one_queue_is_not_called_needless_where_megatron_stops_without_it() -> None:
    """With context parallelism alone it asserts that there is one; the advice was to unset it."""
    assert queues_of("1", CONTEXT, H800).level == "note"
    refused = queues_of(None, CONTEXT, H800)
    assert (refused.level, refused.todo) == ("defeats", "set 1")


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


def test_a_torch_whose_windows_hold_their_operands() -> None:
    found = partial(environment, {}, gpus=["NVIDIA H100"])
    level = {torch: levels(list(found(torch=torch))).get(RECORDING) for torch in ("2.7.1+cu126", "2.8.0", "2.14.0")}
    assert level == {"2.7.1+cu126": "defeats", "2.8.0": None, "2.14.0": None}
    assert RECORDING not in levels(list(environment({RECORDING: "1"}, gpus=[], torch="2.6.0")))


RECORDING = "TORCH_NCCL_AVOID_RECORD_STREAMS"


@pytest.mark.parametrize(
    ("torch", "megatron", "setting", "level", "todo"),
    [
        ("2.10.0", "0.19.2", "expandable_segments:True", "defeats", "unset it, or drop --use-nccl-ub"),
        ("2.12.0", "0.16.1", "expandable_segments:True", "defeats", "unset it, or drop --use-nccl-ub"),
        ("2.11.0", "0.18.2", "expandable_segments:True", "good", ""),
        ("2.10.0", "0.19.2", "", "note", "leave it so: expandable_segments:True and --use-nccl-ub need torch 2.11"),
        ("2.11.0", "0.19.2", "", "note", "set expandable_segments:True"),
    ],
)
def test_growing_segments_were_advised_beside_nccl_ub(torch: str, megatron: str, setting: str, level: str, todo: str) -> None:
    """Megatron raises for the two together, before torch 2.11."""
    variables = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
    found = environment(variables, gpus=[], torch=torch, megatron_core=megatron, nccl_ub=True)
    (finding,) = (finding for finding in found if finding.topic == "PYTORCH_CUDA_ALLOC_CONF")
    assert finding.level == level
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


@pytest.mark.parametrize(
    ("flags", "topic"),
    [
        ("--overlap-moe-expert-parallel-comm", "expert-parallel overlap"),
        ("--recompute-activations", "stock recomputation"),
        ("--fine-grained-activation-offloading", "stock offloading"),
        ("--cuda-graph-impl local", "CUDA graphs"),
    ],
)
def test_what_a_launch_does_today_defeats_overlap_only_beside_a_plan(flags: str, topic: str) -> None:
    """Before there is a plan it is what `plan` replaces."""
    assert of_launch(f"--tensor-model-parallel-size 2 {flags}")[topic] == "note"
    assert of_launch(f"--tensor-model-parallel-size 2 {flags} --lynx-plan plan.yaml")[topic] == "defeats"


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
        ("", "good"),
        ("--no-gradient-accumulation-fusion", "note"),
        ("--defer-embedding-wgrad-compute", "note"),
        ("--tensor-model-parallel-size 1 --no-gradient-accumulation-fusion", None),
    ],
)
def test_weight_gradients_that_may_fill_waits(flags: str, level: str | None) -> None:
    assert of_launch(f"--tensor-model-parallel-size 2 {flags}").get("weight gradients") == level


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
    plain = launch(read_launch(shlex.split("--num-layers 8 --pipeline-model-parallel-size 4")), {})
    [synchronised] = [finding for finding in plain if finding.topic == "batch_p2p_sync"]
    assert "copies to the host that were asked for before it are waited for" in synchronised.costs
    assert of_launch("--num-layers 8 --pipeline-model-parallel-size 4")["batch_p2p_sync"] == "slows"
    chunks = "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
    assert of_launch(chunks)["messages between stages"] == "good"
    assert of_launch(f"{chunks} --no-overlap-p2p-communication")["batch_p2p_sync"] == "slows"


SMALL_LAUNCH = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 16 --tensor-model-parallel-size 8 --bf16 "
    "--vocab-size 32768 --use-flash-attn --transformer-impl local"
)


def of_host(measured: HostTime | Unmeasured, launch: str = "", cluster: str | None = None, plan_file: Path | None = None):
    plan = None if plan_file is None else load_plan(plan_file)
    found = host_time(measured, shlex.split(launch), cluster, plan)
    return {finding.topic: finding for finding in found}


def test_a_host_that_was_not_measured_says_why() -> None:
    (finding,) = of_host(Unmeasured("megatron-core cannot be imported (No module named 'megatron')")).values()
    assert (finding.level, finding.topic) == ("note", "host time")
    assert finding.state.startswith("not measured: megatron-core cannot be imported")


def test_host_time_of_a_layer_is_shown_and_a_launch_needs_its_gpus() -> None:
    found = of_host(made_up_host_time(), SMALL_LAUNCH)
    assert found["host time"].state == (
        "a layer and micro-batch, forward and backward: stock none 2 ms, stock full 3 ms, a plan that keeps all 2.2 ms, "
        "one that recomputes all 3.8 ms (Megatron's own layers on a CPU of a test)"
    )
    assert "--cluster" in found["host-bound"].todo


@pytest.mark.parametrize(("times", "level"), [(1.0, "slows"), (1e-3, "good")])
def test_a_launch_of_small_layers_waits_for_a_slow_host(times: float, level: str) -> None:
    found = of_host(made_up_host_time(times), SMALL_LAUNCH, "h800-80g")
    assert found["host-bound launch"].level == level
    if level == "slows":  # 8 layers of 2 ms, 16 micro-batches
        assert found["host-bound launch"].state.startswith("stages 0; stage 0: 256 ms of a step on the host")


def test_the_launchs_plan_is_judged_too(tmp_path: Path) -> None:
    job = job_of(read_launch(shlex.split(SMALL_LAUNCH)), "h800-80g")
    save_plan(uniform_plan(job), tmp_path / "plan.yaml")
    found = of_host(made_up_host_time(), SMALL_LAUNCH, "h800-80g", tmp_path / "plan.yaml")
    assert found["host-bound plan"].level == "slows"
    assert "486 ms of a step on the host" in found["host-bound plan"].state  # 8 layers of 3.8 ms, 16 micro-batches


def test_what_cannot_be_judged_is_a_note_with_its_reason(tmp_path: Path) -> None:
    found = of_host(made_up_host_time(), SMALL_LAUNCH, "h900-80g")
    assert found["host-bound"].level == "note"
    assert "h900-80g" in found["host-bound"].state


TE_RNG = "--te-rng-tracker --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (TE_RNG, "defeats"),
        (f"{TE_RNG} --attention-dropout 0", "defeats"),
        (f"{TE_RNG} --attention-dropout 0 --hidden-dropout 0", None),
        (TE_RNG.replace("--te-rng-tracker", ""), None),
        ("--te-rng-tracker --recompute-activations", "defeats"),
        ("--te-rng-tracker --recompute-activations --attention-dropout 0", None),
        ("--te-rng-tracker --recompute-granularity selective --recompute-modules layernorm", None),
        ("--te-rng-tracker", None),
    ],
)
def test_dropout_that_stock_recomputes_otherwise_is_found(flags: str, level: str | None) -> None:
    """Megatron-LM #5841: gradients are wrong, and nothing said so."""
    assert of_launch(f"--tensor-model-parallel-size 2 {flags}").get("dropout recomputed") == level


def test_the_first_step_of_stocks_offloading_is_named() -> None:
    """Megatron-LM #7398."""
    flags = "--tensor-model-parallel-size 2 --fine-grained-activation-offloading --offload-modules core_attn"
    assert of_launch(flags)["stock offloading's first step"] == "defeats"
    assert "stock offloading's first step" not in of_launch("--tensor-model-parallel-size 2")


def test_a_launch_for_a_cluster_is_judged_by_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The laptop's own memory was reported, and a variable without which Megatron stops was said to slow."""
    monkeypatch.setattr(doctor, "gpus", list)
    words = shlex.split("--num-layers 8 --tensor-model-parallel-size 2")
    for cluster, level in (("h100-80g", "defeats"), ("b200-180g", "good")):
        node = load_cluster(cluster, "--cluster").node
        found = {each.topic: each for each in doctor.findings(words, cluster=cluster)}
        assert found["host memory"].state.startswith(f"{node.host_memory_gib:g} GiB on each node, which {cluster}")
        assert found["CUDA_DEVICE_MAX_CONNECTIONS"].level == level
