"""Layouts one step away from a launch's."""

from __future__ import annotations

from megatron_lynx.advise.neighbours import Near
from megatron_lynx.config import Job
from tests.config.jobs import catalogued_job


def sizes(gpus: int, tensor: int) -> set[int]:
    """Tensor-parallel sizes of all neighbours."""
    layout = {"tensor": tensor, "sequence_parallel": True, "distributed_optimizer": True}
    job: Job = catalogued_job("gpt-175b", "h100-80g", gpus=gpus, batch=16, parallel=layout, policy="planned")
    return {jobs[0].parallel.tensor for jobs in Near(job, gpus).layouts()}


def test_tensor_parallel_ranks_stay_on_one_node() -> None:
    """Sixteen would be on two nodes of eight."""
    assert sizes(16, 8) == {4, 8}
    assert sizes(16, 4) == {2, 4, 8}
