"""Ranks answer in order, say which of them failed and why, and never outlive a failure or their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_lynx.testbed.groups import share_one_device
from megatron_lynx.testbed.ranks import RankError, RankPool, run_ranks
from tests.tiny_jobs import tiny_job

from ..nursery import process
from . import on_ranks


def alive(pid):
    """Whether a process runs (a zombie, whose parent has not looked yet, does not)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=200):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_results_come_in_order_from_processes_of_their_own(pool_of):
    results = pool_of(2).run(on_ranks.double, torch.arange(3))
    assert [rank for rank, *_ in results] == [0, 1]
    assert len({os.getpid(), *(pid for _, pid, *_ in results)}) == 3
    assert all(torch.equal(tensor, torch.tensor([0, 2, 4])) for *_, tensor in results)
    again = pool_of(2).run(on_ranks.double, torch.arange(3))
    assert [pid for _, pid, *_ in again] == [pid for _, pid, *_ in results]


def test_ranks_have_cores_of_their_own(monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    monkeypatch.setattr(process, "PINNED", True)
    one, other = (cores for *_, cores, _ in run_ranks(on_ranks.double, 2, torch.ones(1)))
    assert len(one) == len(other) == 1
    assert one != other


def test_failure_of_one_rank_is_raised_with_its_traceback_and_ends_all():
    with RankPool(2) as pool:
        pids = [pid for _, pid, *_ in pool.run(on_ranks.double, torch.ones(1))]
        with pytest.raises(RankError, match=r"(?s)rank 1: .*in fail_on_one.*KeyError: 'the reason'") as caught:
            pool.run(on_ranks.fail_on_one, timeout_s=60)
        assert caught.value.rank == 1
        assert isinstance(caught.value.__cause__, KeyError)
        assert not any(alive(pid) for pid in pids)
        with pytest.raises(RankError, match=r"rank \d: ended without an answer \(exit status 3\)"):
            pool.run(on_ranks.vanish)
        with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] within 1 s"):
            pool.run(on_ranks.sleep, timeout_s=1)


def test_all_groups_of_a_rank_share_one_device():
    """Story: each of twenty groups had a device, whose thread looked a hundred times a second: most of two cores went to that."""
    jobs = [tiny_job("gpt", tensor=2), tiny_job("gpt", pipeline=2, microbatches=4)]
    with RankPool(2) as pool:
        assert pool.run(on_ranks.threads_that_look_for_events, jobs) == [[1, 1], [1, 1]]


def test_a_later_pytorch_says_more_of_a_group(monkeypatch):
    """2.14 says `enable_reconfigure`: no group could be made."""
    monkeypatch.setattr(c10d, "ProcessGroupGloo", c10d.ProcessGroupGloo)
    share_one_device()
    group = c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=5), group_name="its name")
    assert group.options.group_name == "its name"


def test_functions_of_main_are_refused():
    def local(rank):
        return rank

    local.__module__ = "__main__"
    with pytest.raises(ValueError, match="defined in __main__"):
        run_ranks(local, 2)


@pytest.mark.slow
def test_nothing_is_left_when_the_parent_is_killed(tmp_path):
    """Killed with SIGKILL it can clean up nothing itself: its ranks must end of their own accord."""
    script = (
        "from megatron_lynx.testbed.ranks import run_ranks\n"
        "from tests.testbed.sleeping import say_pid_and_sleep\n"
        f"run_ranks(say_pid_and_sleep, 2, {str(tmp_path)!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        ranks = [int(file.read_text()) for file in files]
        assert all(map(alive, ranks))
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not any(map(alive, ranks)))
