"""The card's real budget: what PyTorch reports, less parts that say what they are; more communicators leave less."""

from __future__ import annotations

import pytest

from megatron_lynx.config import load_job
from megatron_lynx.config.cluster import NcclChannels
from megatron_lynx.config.device_reserve import Communicator
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.planner.writing import planned_device
from megatron_lynx.units import GIB, MIB

from .jobs import catalogued_job

A100 = NcclChannels(within_node=24, between_nodes=16, of_peers=32)
H100 = A100.model_copy(update={"multicast": True})
DENSE = {"tensor": 1, "distributed_optimizer": True}
CLUSTERS = [file.stem for file in (bundled_configs() / "clusters").glob("*.yaml") if file.stem != "testbed"]


def unbudgeted(cluster: str = "h100-80g", gpus: int = 8, **fields):
    """Llama 3 8B without a stated budget."""
    return catalogued_job("llama3-8b", cluster, gpus=gpus, policy="planned", **{"parallel": DENSE, "budget": {}, **fields})


@pytest.mark.parametrize(
    ("group", "nccl", "published_bytes"),
    [
        (Communicator("of two", 2, 2), A100, 544 * MIB),
        (Communicator("of four", 4, 4), A100, 688 * MIB),
        (Communicator("an exchange", 8, 8, "exchange"), H100, 3.28e9),
    ],
    ids=["NVIDIA/nccl #964, two ranks", "NVIDIA/nccl #964, four", "NVIDIA/nccl #1685"],
)
def test_buffers_of_communicators_are_what_people_have_found(
    group: Communicator, nccl: NcclChannels, published_bytes: float
) -> None:
    assert group.buffer_bytes(nccl) == pytest.approx(published_bytes, rel=0.01)


def test_the_layout_decides_which_communicators_there_are() -> None:
    def names(**fields) -> list[str]:
        return [each.name for each in unbudgeted(**fields).communicators]

    assert names(gpus=1) == []
    assert names() == ["world", "data", "optimizer"]
    wide = {"tensor": 2, "context": 2, "pipeline": 2, "sequence_parallel": True, "distributed_optimizer": True}
    assert names(gpus=16, parallel=wide) == ["world", "tensor", "context", "data", "optimizer", "model", "pipeline"]
    mixtral = load_job("jobs/mixtral-8x7b-h100-80g")
    assert {"expert", "routing", "expert data"} <= {each.name for each in mixtral.communicators}


def test_groups_that_leave_a_node_have_other_channels() -> None:
    (data,) = [each for each in unbudgeted(gpus=64).communicators if each.name == "data"]
    assert (data.ranks, data.within) == (64, 8)
    assert data.buffer_bytes(A100) == (16 + 16 * 28) * MIB
    far, near = Communicator("experts", 64, 8, "exchange"), Communicator("experts", 8, 8, "exchange")
    assert near.buffer_bytes(A100) == (16 + 7 * 32 * 14) * MIB
    assert far.buffer_bytes(A100) == (16 + 7 * 8 * 14 + 512) * MIB, "near peers have no more channels than those of other nodes"


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather", "deepep", "hybridep"])
def test_kernels_that_bring_tokens_to_experts_leave_an_exchange_of_nccl_unused(dispatcher: str) -> None:
    """31 peers x 32 channels x 14 MiB were counted for HybridEP on a GB200 rack, which never asks NCCL for an exchange."""
    mixtral = load_job("jobs/mixtral-8x7b-h100-80g")
    experts = mixtral.model.experts.model_copy(update={"dispatcher": dispatcher})
    job = mixtral.model_copy(update={"model": mixtral.model.model_copy(update={"experts": experts})})
    groups = {each.name: each.use for each in job.communicators}
    assert groups["routing"] == "collectives"
    assert groups.get("expert") == ("exchange" if dispatcher == "alltoall" else None)


def test_the_budget_is_the_device_less_the_parts() -> None:
    job = unbudgeted()
    parts = job.device_reserve.parts
    assert job.memory_budget_bytes == int(GIB * 79.1) - sum(parts.values())
    assert 74.0 < job.memory_budget_bytes / GIB < 74.3
    assert set(parts) == {"context", "libraries", "nccl", "allocator"}
    assert parts["nccl"] == sum(job.device_reserve.as_json["nccl_bytes"].values())
    fixed = unbudgeted(budget={"expandable_segments": False})
    assert job.memory_budget_bytes - fixed.memory_budget_bytes == pytest.approx((3.1 - 1.2) * GIB, abs=2)


def test_a_stated_budget_goes_before_the_parts() -> None:
    job, asked = unbudgeted(), unbudgeted(budget={"memory_gib": 64.6})
    assert asked.memory_budget_bytes == int(GIB * 64.6)
    assert asked.device_reserve == job.device_reserve


def test_what_others_have_of_a_device_is_left_to_them() -> None:
    """A share is of what the device reports, and the reserve is inside of it: vLLM's 0.45 and our 0.55 are the whole."""
    job = unbudgeted()
    parts_bytes, device_bytes = sum(job.device_reserve.parts.values()), job.device_reserve.memory_bytes
    shared = unbudgeted(budget={"share": 0.55})
    assert shared.memory_budget_bytes == int(0.55 * device_bytes) - parts_bytes
    beside = unbudgeted(budget={"share": 0.55, "beside": [{"what": "reference model", "gib": 15}]})
    assert shared.memory_budget_bytes - beside.memory_budget_bytes == 15 * GIB
    assert "others' share 35.60, reference model 15.00, context" in beside.device_reserve.in_words
    assert planned_device(beside).outside_bytes == device_bytes - beside.memory_budget_bytes - int(1.2 * GIB)
    assert job.digest == unbudgeted(budget={"beside": []}).digest != shared.digest
    with pytest.raises(ValueError, match=r"leave it out, or budget\.share and budget\.beside"):
        unbudgeted(budget={"share": 0.55, "memory_gib": 40})


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_cluster_of_the_catalogue_has_the_parts_of_its_reserve(cluster: str) -> None:
    data = cluster_data(bundled_configs() / "clusters" / f"{cluster}.yaml")
    used = unbudgeted(cluster).memory_budget_bytes / GIB / data["memory_gib"]
    assert 0.88 < used < 0.985


def test_the_parts_add_up_to_what_a_known_run_had_outside_of_pytorch() -> None:
    """Megatron-Bridge #2221: 275.82 GiB in use of a GB300, 210.08 + 59.51 of them PyTorch's. No constant was chosen for it."""
    layout = {"tensor": 4, "pipeline": 8, "sequence_parallel": True, "distributed_optimizer": True}
    job = catalogued_job(
        "llama3-405b", "gb200-nvl72", gpus=256, batch=1536, parallel={**layout, "partition": "auto"}, policy="planned"
    )
    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"memory_gib": 276.5})})
    outside = sum(size for part, size in job.device_reserve.parts.items() if part != "allocator")
    assert outside / GIB == pytest.approx(275.82 - 210.08 - 59.51, rel=0.25)
