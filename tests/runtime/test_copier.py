"""Copies come behind what they are told to follow, and say what went wrong."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError
from megatron_lynx.runtime import cuda
from megatron_lynx.runtime.cuda import CudaDevice
from megatron_lynx.runtime.device import CallingThread, CpuDevice, CpuEvent, Device
from megatron_lynx.runtime.offload import copier as copier_file
from megatron_lynx.runtime.offload.copier import MOST_WAITS, Copier, Owner, copiers_for
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.testbed.ranks import RankPool
from tests.runtime.devices import CPU, delay, launches_block, on_every_device, under_way
from tests.runtime.devices import device as device
from tests.runtime.on_ranks import a_copy_that_fails_on_streams, a_graph_that_is_dropped_on_streams, there_and_back_on_streams

OWNER = Owner("stage 1, chunk 0", 7)
Both = tuple[Copier, Copier]


@pytest.fixture
def copiers() -> Iterator[Both]:
    """Of the CPU, where a copy is done by a thread and a test can hold it up."""
    both = copiers_for(CPU, Trace())
    yield both
    for copier in both:
        copier.close()


@pytest.fixture
def copiers_of(device: Device) -> Iterator[Both]:
    """Of any device."""
    both = copiers_for(device, Trace(device))
    yield both
    for copier in both:
        copier.close()


def filled(value: int) -> Tensor:
    return torch.full((4096,), value, dtype=torch.uint8)


def test_a_reload_comes_behind_its_own_way_out(copiers: Both) -> None:
    out, back = copiers
    timeline: list[str] = []
    may_leave = threading.Event()

    def slowly(target: Tensor, source: Tensor) -> None:
        timeline.append("out begins")
        may_leave.wait(10)
        target.copy_(source)
        timeline.append("out ends")

    def noted(target: Tensor, source: Tensor) -> None:
        timeline.append("back begins")
        target.copy_(source)

    out.move, back.move = slowly, noted
    host, returned = filled(0), filled(0)
    leaving = out.start([(host, filled(3))], OWNER)
    coming = back.start([(returned, host)], OWNER, after=(leaving, None))
    time.sleep(0.02)  # the reload has every chance to begin too early
    assert not coming.done
    may_leave.set()
    back.wait(coming)
    assert timeline == ["out begins", "out ends", "back begins"]
    assert torch.equal(returned, filled(3))
    assert back.take_waited_s() > 0 == back.take_waited_s()


@on_every_device
def test_an_error_names_stage_micro_batch_and_bytes(copiers_of: Both) -> None:
    out, back = copiers_of
    assert (out.direction, back.direction) == ("offload", "reload")

    def breaking(target: Tensor, source: Tensor) -> None:
        raise MemoryError("no pages left")

    out.move = breaking
    leaving = out.start([(filled(0), filled(3))], OWNER)
    coming = back.start([(filled(0), filled(0))], OWNER, after=(leaving,))
    for copier, copy in ((out, leaving), (back, coming)):
        with pytest.raises(OffloadError, match="copying activations to the host failed") as raised:
            copier.wait(copy)
        assert raised.value.problems[0].where == "stage 1, chunk 0, micro-batch 7 of this run, 4096 bytes"
        assert "MemoryError: no pages left" in raised.value.problems[0].found
    out.move = Tensor.copy_
    out.wait(out.start([(filled(0), filled(3))], OWNER))


@on_every_device
def test_there_and_back_behind_what_was_asked_before(device: Device, copiers_of: Both) -> None:
    """Nobody waits on the host until the end; the host memory is lent again while it is still read."""
    out, back = copiers_of
    host = torch.zeros(4096, dtype=torch.uint8, pin_memory=device.where.type == "cuda")

    def late(target: Tensor, source: Tensor) -> None:
        delay(device)
        target.copy_(source, non_blocking=True)

    out.move = back.move = late
    sources = [torch.full((4096,), number, dtype=torch.uint8, device=device.where) for number in range(3)]
    reader, returned = None, []
    for _ in range(3):
        leaving = out.start([(host, sources.pop(0))], OWNER, after=(reader,))
        returned.append(torch.empty(4096, dtype=torch.uint8, device=device.where))
        reader = back.start([(returned[-1], host)], OWNER, after=(leaving,))
        torch.full((1 << 16,), 255, dtype=torch.uint8, device=device.where)  # into memory that was let go too early
    assert under_way(reader, device)
    back.wait(reader)
    assert [set(tensor.tolist()) for tensor in returned] == [{0}, {1}, {2}]
    assert out.take_bytes() == back.take_bytes() == 3 * 4096
    assert back.take_waited_s() > 0 or launches_block(device)
    assert back.take_waited_s() == 0


@on_every_device
def test_a_copy_holds_its_tensors_until_compute_waits_or_it_is_over(device: Device, copiers_of: Both) -> None:
    if launches_block(device):
        pytest.skip("each launch waits for its end: nothing is held")
    out, _ = copiers_of

    def late(target: Tensor, source: Tensor) -> None:
        delay(device)
        target.copy_(source, non_blocking=True)

    out.move = late
    host = torch.zeros(4096, dtype=torch.uint8, pin_memory=device.where.type == "cuda")
    sources = [torch.zeros(4096, dtype=torch.uint8, device=device.where) for _ in range(2)]
    held = [weakref.ref(source) for source in sources]
    first, _ = (out.start([(host, sources.pop(0))], OWNER) for _ in range(2))
    out.settle()
    assert all(one() is not None for one in held)
    out.wait(first)
    assert [one() is None for one in held] == [True, False]
    out.drain()
    assert held[1]() is None


@on_every_device
def test_waits_are_added_up_although_nobody_asks(device: Device, copiers_of: Both) -> None:
    """Events of waits piled up over a run without logs."""
    out, _ = copiers_of
    host, here = filled(0), torch.zeros(4096, dtype=torch.uint8, device=device.where)
    for _ in range(2 * MOST_WAITS):
        out.wait(out.start([(host, here)], OWNER))
    device.synchronize()
    out.wait(out.start([(host, here)], OWNER))
    assert len(out._waits) <= MOST_WAITS
    assert out.take_waited_s() >= 0


def test_cancelling_waits_for_what_runs_and_drops_what_has_not_begun(copiers: Both) -> None:
    out, _ = copiers
    begun, may_go = threading.Event(), threading.Event()
    targets: list[Tensor] = []

    def held_up(target: Tensor, source: Tensor) -> None:
        begun.set()
        may_go.wait(10)
        target.copy_(source)
        targets.append(target)

    out.move = held_up
    hosts = [filled(0), filled(0)]
    first, second = (out.start([(host, filled(3))], OWNER) for host in hosts)
    begun.wait(10)
    threading.Timer(0.02, may_go.set).start()
    out.cancel()
    assert first.done
    assert second.done
    assert first.error is None
    assert second.error is not None
    assert torch.equal(hosts[0], filled(3))
    assert torch.equal(hosts[1], filled(0))


def test_a_step_that_fails_behind_a_dead_peer_does_not_wait_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy comes behind compute, compute behind a receive, and the peer was dead: the error came out when NCCL gave up, ten
    minutes later. Whoever cancels waits for a moment, once, and what the copy reads and writes is held."""
    monkeypatch.setattr(copier_file, "GRACE_S", 0.05)
    receive = CpuEvent()  # which nobody answers
    waits: list[float] = []

    class Behind(CallingThread):
        def record(self, *, timed: bool = False) -> CpuEvent:
            return receive

    monkeypatch.setattr(CpuDevice, "current", Behind())
    monkeypatch.setattr(CpuEvent, "within", lambda event, seconds: waits.append(seconds) or event._reached.wait(seconds))
    out = Copier("offload", CpuDevice(torch.device("cpu")), Trace())
    host, source = filled(0), filled(3)
    held = weakref.ref(source)
    out.start([(host, source)], OWNER)
    del source
    failing = threading.Thread(target=lambda: [out.cancel(), out.cancel(), out.close()], daemon=True)
    failing.start()
    failing.join(30)
    assert not failing.is_alive(), "it waits for the receive"
    assert waits == [0.05]
    assert held() is not None
    receive.reach()
    deadline = time.monotonic() + 10
    while not out._holding[0].done and time.monotonic() < deadline:
        time.sleep(0.001)
    out.settle()
    assert held() is None
    assert set(host.tolist()) == {0}, "it was cancelled"


def test_what_copies_behind_a_dead_peer_use_is_held_without_their_copier(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would give their memory to others, and the copy would still be made one day."""
    reached = [False]

    class Event:
        def __init__(self, stream: object = None, timed: bool = False) -> None: ...

        done = property(lambda self: reached[0])

    monkeypatch.setattr(cuda, "CudaEvent", Event)
    device, source = CudaDevice(torch.device("cuda", 0)), filled(3)
    held = weakref.ref(source)
    device.hold([source], Event())
    del source
    device._look_back()
    assert held() is not None
    reached[0] = True
    device._look_back()
    assert held() is None


def test_no_thread_outlives_its_copier() -> None:
    """Threads of other tests' copiers may end meanwhile."""
    before = set(threading.enumerate())

    def threads() -> int:
        return sum(thread.name.startswith("lynx-offload") for thread in set(threading.enumerate()) - before)

    closed, forgotten = Copier("offload", CPU, Trace()), Copier("offload", CPU, Trace())
    for copier in (closed, forgotten):
        copier.wait(copier.start([(filled(0), filled(1))], OWNER))
    assert threads() == 2
    closed.close()
    assert threads() == 1
    del copier, forgotten
    gc.collect()
    deadline = time.monotonic() + 10
    while threads() > 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threads() == 0


def test_streams_are_asked_for_what_they_can_do(pool_of: Callable[[int], RankPool]) -> None:
    """As far as a machine without a GPU can run it."""
    found = pool_of(1).run(there_and_back_on_streams)[0]
    assert [name for name, true in found.items() if not true] == []


def test_a_failure_is_told_where_it_is_waited_for_and_holds_nothing(pool_of: Callable[[int], RankPool]) -> None:
    found = pool_of(1).run(a_copy_that_fails_on_streams)[0]
    assert [name for name, true in found.items() if not true] == []


def test_what_a_dropped_graph_sent_out_is_let_go(pool_of: Callable[[int], RankPool]) -> None:
    """Its storages are gone, so nobody asked their copies: they held the originals until the next copy out."""
    assert pool_of(1).run(a_graph_that_is_dropped_on_streams) == [(True, False)]


def test_a_wait_for_a_copy_is_in_the_trace() -> None:
    trace = Trace()
    out = Copier("offload", CPU, trace)
    may_leave = threading.Event()
    out.move = lambda target, source: (may_leave.wait(10), target.copy_(source))
    trace.start()
    leaving = out.start([(filled(0), filled(3))], OWNER)
    threading.Timer(0.02, may_leave.set).start()
    out.wait(leaving)
    out.wait(leaving)
    events = {event.kind: event for event in trace.stop()}
    assert set(events) == {"offload", "copy_wait"}
    assert events["copy_wait"].micro_batch == OWNER.micro_batch
    assert events["copy_wait"].end_s - events["copy_wait"].start_s <= out.take_waited_s()
    out.close()
