"""A rank's share of host memory, where it is asked for without a model."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.apply import installation as host_share
from megatron_lynx.free_memory import FreeMemory, Pot


def limit_for(offload: object) -> Any:
    plan: Any = SimpleNamespace(stages=[SimpleNamespace(offload=None), SimpleNamespace(offload=offload)])
    return host_share.host_limit_of(plan, run=[])


def test_limits_that_cannot_be_read_are_one_message(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    free = FreeMemory((Pot("the machine", "a", 10 * 2**30),), ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/jobs/memory.max"))
    monkeypatch.setattr(host_share, "free_memory", lambda: free)
    with caplog.at_level(logging.WARNING):
        assert limit_for("some").most_bytes == 9 * 2**30
    assert caplog.messages == [
        "no limit of host memory can be read in /sys/fs/cgroup/memory.max, /sys/fs/cgroup/jobs/memory.max: counted on 10.00 GiB "
        "free of the machine, 1.00 GiB of it in reserve, for 1 rank"
    ]


def test_without_anything_to_offload_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_share, "free_memory", lambda: pytest.fail("asked"))
    assert limit_for(None) is None


@pytest.mark.parametrize(
    ("shared_out", "instances", "parameters"),
    [(False, 1, 100), (True, 1, 25), (True, 2, 50)],
    ids=["whole on each rank", "shared out", "in two instances"],
)
def test_a_checkpoint_takes_the_ranks_own_part_of_the_states(shared_out: bool, instances: int, parameters: int) -> None:
    """Ranks of one instance of the distributed optimizer share them out, as the planner counts (`Job.optimizer_sharers`)."""
    config = SimpleNamespace(use_distributed_optimizer=shared_out, num_distributed_optimizer_instances=instances)
    model, wrapper = torch.nn.Linear(10, 10, bias=False), SimpleNamespace(ddp_config=config)
    run: Any = SimpleNamespace(chunks=[model], wrappers=[wrapper], replicas=4)
    assert host_share._state_bytes(run) == host_share.STATE_BYTES * parameters
