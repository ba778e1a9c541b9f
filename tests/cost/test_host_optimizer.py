"""An optimizer on the host: bytes as Megatron's HybridDeviceOptimizer makes them, seconds by hand, and who shares the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from pydantic import ValidationError

from megatron_lynx.config.cluster import HostAdam, Node
from megatron_lynx.config.parallel import Optimizer
from megatron_lynx.cost.host_optimizer import (
    PAGEABLE,
    HostUpdate,
    OnHost,
    host_seconds,
    left_for_activations_bytes,
    made_bytes,
    optimizer_host_bytes,
    states_s,
)
from megatron_lynx.cost.parameters import bytes_each, owned_parameters, stage_parameters
from megatron_lynx.cost.update import reduction_s, update_s
from megatron_lynx.errors import ConfigError
from megatron_lynx.estimate import estimate
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.published import runs
from megatron_lynx.search import search
from megatron_lynx.units import GIB
from megatron_lynx.yaml_file import read_yaml, write_yaml
from tests.config.jobs import catalogued_job
from tests.stock.parts import memory_of_stages, stage_parts

SIZES = [(64, 32), (64,), (128, 16), (32, 32), (256,), (96, 32)]
LAYOUT = {"tensor": 1, "pipeline": 2, "distributed_optimizer": True}


NODE = Node(gpus=8, host_memory_gib=1024.0)


def offloading(share: float | str, *, gradients: str = "fp32", **fields: Any):
    optimizer = {"precision_aware": True, "offload": share, "gradients": gradients, **fields.pop("optimizer", {})}
    return catalogued_job(
        "llama3-8b", fields.pop("cluster", "h100-80g"), **{"gpus": 8, "parallel": LAYOUT, "optimizer": optimizer, **fields}
    )


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU: Megatron's optimizer asks each, and moves what it offloads by these methods."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


class Stream:
    """CPU tensors need none."""

    def wait_stream(self, other: Stream) -> None: ...

    def record_event(self) -> Stream:
        return self

    def wait(self, other: Stream) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer asks of CUDA itself; the rest is Megatron's and PyTorch's own."""
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


def stepped(share: float, gradients: torch.dtype, *, overlapped: bool) -> tuple[HybridDeviceOptimizer, list[torch.Tensor]]:
    """As Megatron makes it for bf16 parameters (`get_megatron_optimizer`), after two updates."""
    parameters = [torch.randn(size).bfloat16().as_subclass(OnDevice) for size in SIZES]
    optimizer = HybridDeviceOptimizer(
        [{"params": parameters}],
        offload_fraction=share,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        overlap_cpu_optimizer_d2h_h2d=overlapped,
        pin_cpu_grads=False,
        param_update_in_fp32=True,
        lr=1e-3,
        weight_decay=0.0,
        fused=True,
    )
    for _ in range(2):
        for parameter in parameters:
            parameter.decoupled_grad = torch.randn(parameter.shape).to(gradients).as_subclass(OnDevice)  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, parameters


def bytes_of(optimizer: HybridDeviceOptimizer, device: bool) -> dict[str, int]:
    """Bytes by kind that the inner optimizers hold, on the device or on the host."""
    found = {"main": 0, "moments": 0, "gradients": 0}
    for inner in optimizer.sub_optimizers:
        for parameter in (each for group in inner.param_groups for each in group["params"]):
            if isinstance(parameter, OnDevice) != device:
                continue
            found["main"] += parameter.nbytes
            found["moments"] += inner.state[parameter]["exp_avg"].nbytes + inner.state[parameter]["exp_avg_sq"].nbytes
            found["gradients"] += 0 if parameter.grad is None else parameter.grad.nbytes
    return found


def test_what_an_optimizer_remembers_is_four_bytes_a_number() -> None:
    """Beside four for the main parameter, where weights are in 16 bits."""
    usual = offloading(0.0)
    for states, found in ((0, 4), (1, 8), (2, 12), (3, 16)):
        plain = Optimizer(states=states)
        assert bytes_each(usual.model_copy(update={"optimizer": plain})).optimizer == found


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
@pytest.mark.parametrize("share", [0.25, 0.6, 1.0])
def test_bytes_are_those_that_megatrons_optimizer_makes(share: float, gradients: str) -> None:
    """Whole tensors go, until the share is reached. Gradients in bf16 leave a copy in fp32 on the device; those in fp32 none."""
    made, parameters = stepped(share, torch.bfloat16 if gradients == "bf16" else torch.float32, overlapped=share != 0.6)
    device, host = bytes_of(made, device=True), bytes_of(made, device=False)
    count = sum(parameter.numel() for parameter in parameters)
    gone = sum(copy.numel() for copy in made.gpu_params_map_cpu_copy.values())
    assert share * count <= gone < share * count + max(parameter.numel() for parameter in parameters)
    each = bytes_each(offloading(share, gradients=gradients))
    stays = count - gone
    assert (device["main"], device["moments"]) == (each.main_parameter * stays, each.moments * stays)
    assert (host["main"], host["moments"], host["gradients"]) == (4 * gone, 8 * gone, 4 * gone)
    of_grad_buffer = 4 * stays if gradients == "fp32" else 0  # no copy: it is the buffer's own gradient
    assert device["gradients"] - of_grad_buffer == each.lasting_copy * stays


@pytest.mark.usefixtures("without_cuda")
def test_types_of_a_precision_aware_optimizer_do_not_count_on_the_host() -> None:
    smaller = {"first_moment": "bf16", "second_moment": "bf16", "main_parameters": "remainder"}
    on_device, half = (bytes_each(offloading(share, optimizer=smaller)) for share in (0.0, 0.5))
    assert on_device.optimizer == 2 + 4
    assert half.optimizer == 0.5 * (4 + 8)
    made, _ = stepped(0.5, torch.float32, overlapped=True)
    types = {tensor.dtype for inner in made.sub_optimizers for state in inner.state.values() for tensor in state.values()}
    assert types == {torch.float32}


@pytest.mark.usefixtures("without_cuda")
def test_making_it_copies_what_stays_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distributed optimizer makes it a second time, of what a rank owns: the first one's copies are of whole parameters."""
    made, parameters = stepped(0.25, torch.float32, overlapped=False)
    copies = [copy for copy in made.param_to_fp32_param.values() if isinstance(copy, OnDevice)]
    stays = sum(copy.numel() for copy in copies)
    assert {copy.dtype for copy in copies} == {torch.float32}
    assert stays == sum(parameter.numel() for parameter in parameters) - sum(
        copy.numel() for copy in made.gpu_params_map_cpu_copy.values()
    )
    job = offloading(0.25, gpus=64, batch=64)
    parameters_0 = stage_parameters(job, 0)
    owned = owned_parameters(job, parameters_0)
    assert made_bytes(job, parameters_0) == round(0.75 * (4 * parameters_0.total - 8 * owned))
    assert "optimizer_made" in stage_parts(job, 0).moments
    assert made_bytes(offloading(1.0, gpus=64, batch=64), parameters_0) == 0
    assert "optimizer_made" not in stage_parts(offloading(0.0, gpus=64, batch=64), 0).moments


def test_states_of_a_stage_by_hand() -> None:
    """Llama 3 8B, two stages of four ranks: each owns a quarter of its stage's parameters."""
    full, half, none = (memory_of_stages(offloading(share, policy="full"))[0] for share in (1.0, 0.5, 0.0))
    count = stage_parameters(offloading(0.0), 0).total
    assert full.optimizer == 0
    assert half.optimizer == pytest.approx(0.5 * 12 * count / 4, abs=4)
    assert none.optimizer == pytest.approx(12 * count / 4, abs=4)
    assert full.gradients == none.gradients == 4 * count
    host = optimizer_host_bytes(offloading(1.0), 0)
    assert host == pytest.approx(20 * count / 4 + 2 * (2 * count + 6 * count / 4), rel=1e-6)


def test_seconds_by_hand() -> None:
    """A million parameters out of two: 4 MB each way over PCIe, a tenth of a second of steps; the way back is pageable."""
    adam = HostAdam(made_by="a test", alone_million_per_s=20.0, together_million_per_s=10.0)
    job = offloading(0.5)
    pcie = job.cluster.pcie
    assert pcie is not None
    copy_s = pcie.latency_us * 1e-6 + 4e6 / pcie.byte_per_s
    found = host_seconds(job, 2e6, adam)
    assert found == HostUpdate(copy_s, 0.1, PAGEABLE * copy_s, overlapped=False)
    assert found.total_s == pytest.approx((1 + PAGEABLE) * copy_s + 0.1)
    overlapped = host_seconds(offloading(0.5, optimizer={"overlap_copies": True}), 2e6, adam)
    assert overlapped.total_s == pytest.approx(0.1 + PAGEABLE * copy_s)
    assert [adam.parameters_per_s(ranks, NODE) for ranks in (1, 4, 8)] == [20e6, 20e6, 10e6]
    assert host_seconds(offloading(0.0), 2e6, None).total_s == 0


def test_ranks_of_a_node_share_its_memory_bandwidth_and_its_cores() -> None:
    """Eight ranks on two cores were as fast as on a hundred: 17.2 s for 537 million parameters each in a published run."""
    adam = HostAdam(made_by="a test", alone_million_per_s=900.0, memory_gb_per_s=112.0, core_million_per_s=500.0)
    assert [adam.parameters_per_s(ranks, NODE) for ranks in (1, 4, 8)] == [900e6, 900e6, 500e6]
    few = adam.model_copy(update={"cores": 2})
    assert [few.parameters_per_s(ranks, NODE) for ranks in (1, 2, 8)] == [900e6, 500e6, 125e6]
    assert adam.parameters_per_s(8, NODE.model_copy(update={"cores": 2})) == 125e6
    with pytest.raises(ValidationError, match="cores \\(2\\) needs core_million_per_s"):
        HostAdam(made_by="a test", alone_million_per_s=900.0, cores=2)


def test_nodes_state_their_cpus_and_their_memory() -> None:
    """72 ranks of a rack with 36 CPUs shared the memory bandwidth of one node of eight."""
    clusters = {name: offloading(1.0, cluster=name).cluster for name in ("h200-141g", "a100-80g", "gb200-nvl72")}
    adam = clusters["h200-141g"].host_time.adam  # type: ignore[union-attr]
    assert adam is not None
    bound = adam.model_copy(update={"alone_million_per_s": 1e5})
    rates = [bound.parameters_per_s(cluster.node.gpus, cluster.node) for cluster in clusters.values()]  # type: ignore[union-attr]
    assert rates[0] == pytest.approx(1e9 * bound.memory_gb_per_s / 28 / 8, rel=0.01)
    assert rates[1] == pytest.approx(rates[0] * 2 / 3)
    assert rates[2] == pytest.approx(rates[0] * 36 * 512 / 614.4 / 9)
    assert clusters["a100-80g"].node.cpus_in_words == "128 cores, 409.6 GB/s of host memory"  # type: ignore[union-attr]


def test_it_takes_what_others_have_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Qwen3-0.6B on one H100 (NVIDIA-NeMo/RL #3628) takes 0.435 s more with half of its optimizer on the host; that run chose
    nothing. Steps of four and of eight A800 (ms-swift's examples) were predicted 43 % too long. Where eight ranks have two cores
    (ISEEKYAN/Megatron-LM #188), an update takes four times as long as predicted here."""
    adam = analytic_profile(offloading(0.5)).host_time.adam  # type: ignore[union-attr]
    one = offloading(0.5, gpus=1, parallel={"distributed_optimizer": True}, batch=1)
    assert host_seconds(one, 0.596e9, adam).total_s == pytest.approx(1.187 - 0.752, rel=0.2)
    data = read_yaml(runs.bundled_configs() / "published_launches.yaml")
    for series in data["series"]:
        series["rows"] = [row for row in series["rows"] if "Adam on the host" in row["what"]]
    data["series"] = [series for series in data["series"] if series["rows"]]
    (tmp_path / "published_launches.yaml").write_text(write_yaml(data))
    monkeypatch.setattr(runs, "bundled_configs", lambda: tmp_path)
    errors = {row.what: row.error for row in runs.rows("published_launches") if "Adam on the host: step" in row.what}
    assert len(errors) == 2
    assert max(map(abs, errors.values())) < 15, errors


def test_an_update_takes_so_much_longer() -> None:
    own, gone = (offloading(share) for share in (0.0, 1.0))
    profile = analytic_profile(gone)
    most = max(stage_parameters(gone, stage).total for stage in range(2)) / 4
    added_s = host_seconds(gone, most, profile.host_time.adam).total_s  # type: ignore[union-attr]
    assert update_s(gone, profile) - update_s(own, profile) == pytest.approx(added_s, rel=0.01)
    unknown = profile.model_copy(update={"host_time": None})
    with pytest.raises(ConfigError, match=r"host_time\.adam: found nothing"):
        update_s(gone, unknown)
    assert update_s(own, unknown) > 0


def test_host_memory_is_shared_with_activations() -> None:
    job = offloading(1.0)
    node = job.cluster.node
    assert node is not None
    assert left_for_activations_bytes(job, 0) == node.host_memory_gib * GIB - 8 * optimizer_host_bytes(job, 0)
    assert left_for_activations_bytes(offloading(0.0), 0) == node.host_memory_gib * GIB
    small = job.cluster.model_copy(update={"node": node.model_copy(update={"host_memory_gib": 64.0})})
    answer = estimate(job.model_copy(update={"cluster": small, "policy": "full"}))
    assert [problem.where for problem in answer.shortages] == ["host memory of a node"]
    assert "of the optimizer's state and its copies (8 devices)" in answer.shortages[0].finding
    assert answer.shortages[0].needed.startswith("at most 64 GiB, which ")


def test_what_megatron_refuses_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"offload 0\.5 needs precision_aware: true"):
        offloading(0.5, optimizer={"precision_aware": False})
    with pytest.raises(ValidationError, match=r"needs cluster\.device cuda, found cpu"):
        catalogued_job(
            "tiny-llama",
            "testbed",
            gpus=2,
            batch=2,
            parallel={"distributed_optimizer": True},
            optimizer={"precision_aware": True, "offload": 1.0},
        )


def test_what_a_search_and_a_pipeline_without_flushes_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.offload: found auto, needed a share in \[0, 1\]"):
        search(offloading("auto"), 8, policies=["none"], offload=False)
    with pytest.raises(ValidationError, match="needs all of it on the device: 0, or train with schedule flush"):
        offloading(0.5, schedule="double_buffered")


CUT = {"tensor": 4, "sequence_parallel": True, "distributed_optimizer": True}
EMBEDDED = 128256 * 4096 // 4
"""Llama 3's largest parameter, on one of four tensor-parallel ranks."""


def states_on_host(share: float = 1.0, chunk_mib: int = 256, parallel: Any = CUT, **fields: Any):
    optimizer = {"precision_aware": False, "states_on_host": share, "chunk_mib": chunk_mib}
    return offloading(0.0, optimizer=optimizer, parallel=parallel, **fields)


def test_states_are_on_the_host_but_in_updates() -> None:
    """Llama 3 8B on four ranks of two replicas: an update restores main parameters, and two chunks of moments, each as large as
    those of the largest parameter."""
    plain, job, whole = states_on_host(0.0, 0), states_on_host(), states_on_host(chunk_mib=0)
    owned, updates = stage_parameters(job, 0).total / 2, ("update", "first_update")
    before, chunked, at_once = (stage_parts(each, 0) for each in (plain, job, whole))
    assert (chunked.states.optimizer, at_once.states.optimizer) == (0, 0)
    for moment in before.moments:
        held = [parts.at(moment).total for parts in (before, chunked, at_once)]
        restored = 4 * owned + 2 * 8 * EMBEDDED if moment in updates else 0
        assert held[0] - held[1] == pytest.approx(12 * owned - restored, abs=16)
        assert held[0] - held[2] == pytest.approx(0 if moment in updates else 12 * owned, abs=16)
    assert stage_parts(states_on_host(0.5), 0).states.optimizer == pytest.approx(6 * owned, abs=8)
    assert optimizer_host_bytes(job, 0) == pytest.approx(2 * 12 * owned, abs=32)
    assert left_for_activations_bytes(job, 0) < left_for_activations_bytes(plain, 0)


def test_an_update_waits_for_states_that_nothing_hides() -> None:
    """All at once: for what the reduction of gradients leaves; in chunks also for what the update leaves of the others."""
    plain, job, whole = states_on_host(0.0, 0), states_on_host(), states_on_host(chunk_mib=0)
    profile, pcie, parameters = analytic_profile(plain), plain.cluster.pcie, stage_parameters(job, 0)
    assert pcie is not None
    owned = parameters.total / 2
    added_s = [update_s(each, profile) - update_s(plain, profile) for each in (whole, job)]
    assert added_s[0] == pytest.approx(pcie.shared_s(12 * owned) - reduction_s(plain))
    first_s, others_s = pcie.shared_s(4 * owned + 8 * EMBEDDED), pcie.shared_s(8 * (owned - EMBEDDED))
    assert first_s - reduction_s(plain) < added_s[1] < first_s + others_s - reduction_s(plain)
    assert states_s(job, parameters, 1e-3, 0.0) == pytest.approx(first_s + others_s - 1e-3)
    assert states_s(job, parameters, 1e3, 1e3) == 0


def test_states_on_the_host_and_steps_there_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match=r"states_on_host 1 and offload 0\.5: one of them"):
        offloading(0.5, optimizer={"states_on_host": 1.0})
    with pytest.raises(ValidationError, match=r"states_on_host needs parallel\.distributed_optimizer: true"):
        states_on_host(parallel={"tensor": 4})
    said = estimate(states_on_host(policy="full")).on_host
    assert said is not None
    assert said.in_words.startswith("optimizer's states on the host between updates: 1 of it, ")


def test_it_is_told() -> None:
    answer = estimate(offloading(1.0, policy="full"))
    assert answer.on_host is not None
    assert answer.on_host.in_words.startswith("optimizer on the host: 1 of it, ")
    assert answer.as_json["optimizer_on_host"]["seconds"]["total_s"] == answer.on_host.seconds.total_s  # type: ignore[union-attr]
    assert OnHost.of(offloading(0.0), None, priced=True) is None
    auto = estimate(offloading("auto", policy="none", budget={"memory_gib": 68}))
    assert auto.fits
    assert 0 < auto.job.optimizer.offloaded < 1
