"""Marks of the measuring profiler: events of the device, for which the host waits at the end of a pass."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_lynx.anatomy import MLP
from megatron_lynx.apply.hooks.sites import Place
from megatron_lynx.profiler.timing import LONGER, LONGEST_S, SHORTEST_S, WARMUP, HalfRun, HeadStart, item_seconds, measure_block
from megatron_lynx.runtime.device import Device, Event
from tests.runtime.tiny_half import FC1, FC2, NORM, made


class Reached(Event):
    """The `number`-th point of the device, which it reaches when the host waits."""

    def __init__(self, device: Counting) -> None:
        self.number, self.device = device.marks, device

    def elapsed_time(self, end: Any) -> float:
        assert isinstance(end, Reached)
        assert end.number <= self.device.reached, "asked before the device was there"
        return float(end.number - self.number) * 1e3


class Counting(Device):
    """A device that takes a second for whatever lies between two marks, and counts how often the host waits for it."""

    def __init__(self) -> None:
        self.marks = self.reached = self.waits = 0
        super().__init__(torch.device("cpu"))

    def record(self, stream: Any = None, *, timed: bool = False) -> Event:
        assert timed
        self.marks += 1
        return Reached(self)

    def synchronize(self) -> None:
        self.reached, self.waits = self.marks, self.waits + 1


def test_the_host_waits_once_a_pass() -> None:
    """It used to wait at every door: what it takes to issue an item was in the item's seconds."""
    half, hidden = made()
    device = Counting()
    modules = {NORM: half.norm, FC1: half.fc1, FC2: half.fc2}
    run = HalfRun(MLP, half, {}, hidden, [Place(MLP.of_name[name], module, "forward") for name, module in modules.items()])
    forward, backward = item_seconds(run, HeadStart(device), repetitions=3)
    assert device.waits == WARMUP + 3
    assert forward == {**dict.fromkeys(MLP.names, 1.0), NORM: 3.0}, "with the code before and behind it"
    assert sum(backward.values()) >= len(MLP.names)


def test_a_block_is_waited_for_once_a_pass() -> None:
    device, tensor = Counting(), torch.ones(3, requires_grad=True)
    block = measure_block(lambda: tensor * tensor, device, repetitions=3)
    assert (block.forward_s, block.backward_s, device.waits) == (1.0, 1.0, WARMUP + 3)


def test_the_host_gets_a_head_start_as_long_as_its_pass_before() -> None:
    """Without it what Python takes between two launches is in the seconds of what comes behind."""
    given: list[float] = []
    head_start = HeadStart(Device(torch.device("cpu")), given.append)
    for _ in range(3):
        with head_start:
            time.sleep(0.01)
    assert given[0] == SHORTEST_S, "of the first pass nothing is known"
    assert all(LONGER * 0.01 <= seconds <= LONGEST_S for seconds in given[1:])
    with head_start:
        time.sleep(LONGEST_S)
    with head_start:
        pass
    assert given[-1] == LONGEST_S
