"""What the planner writes for chunks, for the host and for moved layers is what the runtime does, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron_lynx.planner import Decision, decide
from megatron_lynx.profiler.profile import BlockProfile
from megatron_lynx.testbed.ranks import RankPool
from megatron_lynx.testbed.tiny_jobs import tiny_job
from tests.profiler.made_up import made_up_profile
from tests.transparency.test_every_bit import checked

Pools = Callable[[int], RankPool]


def decided(offload_ratio: float = 0.0, policy: str = "planned", **layout: Any) -> Decision:
    """On a machine whose head takes as long as a layer."""
    job = tiny_job("llama", pipeline=2, microbatches=4, **layout)
    job = job.model_copy(update={"offload_ratio": offload_ratio, "policy": policy})
    profile = made_up_profile(job)
    layer_s = profile.attention.forward_s + profile.mlp.forward_s
    return decide(job, profile.model_copy(update={"head": BlockProfile(forward_s=layer_s, backward_s=2 * layer_s)}))


@pytest.mark.parametrize("policy", ["planned", "none", "balanced"])
def test_chunks_that_offload(pool_of: Pools, policy: str) -> None:
    decision = decided(offload_ratio=0.63, policy=policy, layers_per_chunk=1)
    assert all(entry.offload is not None for entry in decision.plan.chunks_of(0))
    assert all(entry.offload is None for entry in decision.plan.chunks_of(1)), "three chunks in flight"
    for rank, (outcome,) in enumerate(checked(pool_of, decision.job, [decision.plan])):
        last = outcome.planned.counts[-1]
        assert (last.offloaded_bytes > 0) == (rank == 0)
        expected = decision.plan.stages[rank].predicted.host_bytes
        assert last.host_bytes == pytest.approx(expected, rel=0.05), "tensors are rounded up, and the smallest stay"


def test_layers_that_were_moved(pool_of: Pools) -> None:
    decision = decided(layers=7, partition="auto")
    assert decision.job.partition == (4, 3)
    checked(pool_of, decision.job, [decision.plan])
