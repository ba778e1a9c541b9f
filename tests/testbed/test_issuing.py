"""Whose processor time counts as issuing a step."""

from __future__ import annotations

import threading
import time

import torch

from megatron_lynx.testbed.host_time import issuing_clock

BUSY_S = 0.05


def busy() -> None:
    begin_s = time.thread_time()
    while time.thread_time() - begin_s < BUSY_S:
        pass


def test_a_thread_that_issues_nothing_does_not_count() -> None:
    """NCCL's threads poll while a step is issued, and the process's time has theirs in it."""
    clock = issuing_clock(torch.device("cpu"))
    begin_s, process_s = clock(), time.process_time()
    other = threading.Thread(target=busy)
    other.start()
    other.join()
    assert time.process_time() - process_s > BUSY_S
    assert clock() - begin_s < BUSY_S


def test_the_thread_that_runs_backward_counts_whoever_asks() -> None:
    """On a GPU hooks run in autograd's thread, and read the same clock as the caller."""
    clock, found = issuing_clock(torch.device("cpu")), list[float]()
    begin_s = clock()
    busy()
    asking = threading.Thread(target=lambda: found.append(clock()))
    asking.start()
    asking.join()
    assert begin_s + BUSY_S < found[0] <= clock()
