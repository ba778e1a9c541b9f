"""Copies come behind what they are told to follow, and errors are raised where they are issued."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from megatron_lynx.runtime.device import Copier, CudaDevice, Device, Event, Trace, copiers_for
from megatron_lynx.testbed.ranks import RankPool
from tests.instruments.streams.threads import ThreadEvent
from tests.runtime.devices import (
    CPU,
    asynchronous,
    delay,
    drain,
    launches_block,
    on_every_device,
    under_way,
    where_copies_take_time,
)
from tests.runtime.devices import device as device
from tests.runtime.on_ranks import a_graph_that_is_dropped_on_streams, there_and_back_on_streams

Both = tuple[Copier, Copier]


@pytest.fixture
def copiers_of(device: Device) -> Iterator[Both]:
    """Of any device."""
    both = copiers_for(device, Trace(device))
    yield both
    for copier in both:
        copier.close()


def filled(value: int) -> Tensor:
    return torch.full((4096,), value, dtype=torch.uint8)


def test_a_reload_comes_behind_its_own_way_out() -> None:
    """And compute that waits for it comes behind it. Copies are late, and the account sees who did not wait."""
    device = asynchronous()
    out, back = copiers_for(device, Trace(device))
    source, host, returned = filled(3), filled(0), filled(0)
    leaving = out.start([(host, source)], 7)
    coming = back.start([(returned, host)], 7, after=(leaving, None))
    assert not coming.done
    back.wait(coming)
    assert torch.equal(returned, filled(3))
    assert device.listener.races == []  # type: ignore[attr-defined]
    assert back.take_waited_s() > 0 == back.take_waited_s()


@on_every_device
def test_an_error_is_raised_where_the_copy_is_issued(copiers_of: Both) -> None:
    """And the next copy is not affected."""
    out, back = copiers_of
    assert (out.direction, back.direction) == ("offload", "reload")

    def breaking(target: Tensor, source: Tensor) -> None:
        raise MemoryError("no pages left")

    for copier in (out, back):
        usual, copier.move = copier.move, breaking
        with pytest.raises(MemoryError, match="no pages left"):
            copier.start([(filled(0), filled(3))], 7)
        copier.move = usual
        copier.wait(copier.start([(filled(0), filled(3))], 7))


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
        leaving = out.start([(host, sources.pop(0))], 7, after=(reader,))
        returned.append(torch.empty(4096, dtype=torch.uint8, device=device.where))
        reader = back.start([(returned[-1], host)], 7, after=(leaving,))
        torch.full((1 << 16,), 255, dtype=torch.uint8, device=device.where)  # into memory that was let go too early
    assert under_way(reader, device)
    back.wait(reader)
    assert [set(tensor.tolist()) for tensor in returned] == [{0}, {1}, {2}]
    assert out.take_bytes() == back.take_bytes() == 3 * 4096
    assert device is CPU or back.take_waited_s() > 0 or launches_block(device)
    assert back.take_waited_s() == 0


@where_copies_take_time
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
    first, _ = (out.start([(host, sources.pop(0))], 7) for _ in range(2))
    out.settle()
    assert all(one() is not None for one in held)
    out.wait(first)
    assert [one() is None for one in held] == [True, False]
    drain(out)
    assert held[1]() is None


@where_copies_take_time
def test_waits_are_added_up_although_nobody_asks(device: Device, copiers_of: Both) -> None:
    """Events of waits piled up over a run without logs."""
    out, _ = copiers_of
    host, here = filled(0), torch.zeros(4096, dtype=torch.uint8, device=device.where)
    for _ in range(20):
        out.wait(out.start([(host, here)], 7))
        device.synchronize()
    assert len(out._waits._timed) <= 1
    assert out.take_waited_s() >= 0


def test_a_step_that_fails_behind_a_dead_peer_does_not_wait_for_its_copies() -> None:
    """A copy comes behind compute, compute behind a receive, and the peer was dead: the error came out when NCCL gave up, ten
    minutes later. Nothing waits, and what the copy reads and writes is held until it is over."""
    device, receive = asynchronous(), ThreadEvent()  # which no peer answers
    out = Copier("offload", device, Trace(device))
    out._stream._does.run(receive.synchronize)
    host, source = filled(0), filled(3)
    held = weakref.ref(source)
    copy = out.start([(host, source)], 7)
    del source
    closing = threading.Thread(target=out.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "it waits for the receive"
    assert held() is not None
    receive.reach()
    copy.event.synchronize()
    out.settle()
    assert held() is None
    assert torch.equal(host, filled(3))


def test_what_copies_behind_a_dead_peer_use_is_held_without_their_copier() -> None:
    """torch's allocator would give their memory to others, and the copy would still be made one day."""
    reached = [False]

    class Reached(Event):
        def query(self) -> bool:
            return reached[0]

    device, source = CudaDevice(torch.device("cuda", 0)), filled(3)
    held = weakref.ref(source)
    device.hold([source], Reached())
    del source
    device._poll()
    assert held() is not None
    reached[0] = True
    device._poll()
    assert held() is None


def test_streams_are_asked_for_what_they_can_do(pool_of: Callable[[int], RankPool]) -> None:
    """As far as a machine without a GPU can run it."""
    found = pool_of(1).run(there_and_back_on_streams)[0]
    assert [name for name, true in found.items() if not true] == []


def test_what_a_dropped_graph_sent_out_is_let_go(pool_of: Callable[[int], RankPool]) -> None:
    """Its storages are gone, so nobody asked their copies: they held the originals until the next copy out."""
    assert pool_of(1).run(a_graph_that_is_dropped_on_streams) == [(True, False)]


def test_a_wait_for_a_copy_is_in_the_trace() -> None:
    device = asynchronous()
    trace = Trace(device)
    out = Copier("offload", device, trace)
    trace.start()
    leaving = out.start([(filled(0), filled(3))], 7)
    out.wait(leaving)
    out.wait(leaving)
    events = {event.kind: event for event in trace.stop()}
    assert set(events) == {"offload", "copy_wait"}
    assert events["copy_wait"].micro_batch == 7
    assert events["copy_wait"].end_s - events["copy_wait"].start_s <= out.take_waited_s()
    out.close()
