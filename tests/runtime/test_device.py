"""What every device promises: streams run in order and beside each other, and whoever waits for an event comes behind it."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx import runtime
from megatron_lynx.runtime.device import CudaDevice, Device, device_for, present_device
from megatron_lynx.runtime.surroundings import RandomSource
from megatron_lynx.timeline import seconds_between
from tests.runtime.devices import CPU, delay, launches_block, on_every_device, under_way, where_streams_have_a_clock
from tests.runtime.devices import device as device


def numbers(device: Device, value: int) -> Tensor:
    return torch.full((4096,), value, device=device.where)


@on_every_device
def test_a_stream_runs_in_order_and_the_host_goes_on(device: Device) -> None:
    target, stream = numbers(device, 0), device.stream("test")
    target.add_(0).mul_(1)  # on a GPU the first launch of a kernel may wait for the device
    device.wait(device.record(), stream)
    device.run(stream, partial(delay, device))
    for _ in range(100):
        device.run(stream, partial(target.add_, 1))
        device.run(stream, partial(target.mul_, -1))
    over = device.record(stream)
    assert under_way(over, device)
    over.synchronize()
    assert over.query()
    assert set(target.tolist()) == {0}


@on_every_device
def test_a_stream_waits_for_another_ones_event(device: Device) -> None:
    source, target = numbers(device, 0), numbers(device, 0)
    first, second = device.stream("first"), device.stream("second")
    for stream in (first, second):
        device.wait(device.record(), stream)
    device.run(first, partial(delay, device))
    device.run(first, partial(source.fill_, 7))
    device.wait(device.record(first), second)
    device.run(second, partial(target.copy_, source))
    waits_too, unheld = device.record(second), device.record(device.stream("third"))
    unheld.synchronize()
    assert under_way(waits_too, device), "only who waits is held up"
    device.record(second).synchronize()
    assert set(target.tolist()) == {7}


@on_every_device
def test_a_stream_comes_behind_what_compute_was_given(device: Device) -> None:
    source, target, stream = numbers(device, 0), numbers(device, 0), device.stream("test")
    device.synchronize()
    delay(device)
    source.fill_(7)
    device.wait(device.record(), stream)
    device.run(stream, partial(target.copy_, source))
    device.record(stream).synchronize()
    assert set(target.tolist()) == {7}


@on_every_device
def test_compute_comes_behind_an_event_that_it_waits_for(device: Device) -> None:
    source, stream = numbers(device, 0), device.stream("test")
    device.wait(device.record(), stream)
    device.run(stream, partial(delay, device))
    device.run(stream, partial(source.fill_, 7))
    device.wait(device.record(stream))
    assert set((source * 1).tolist()) == {7}


@where_streams_have_a_clock
def test_inside_a_stream_it_is_the_current_one(device: Device) -> None:
    """What times copies asks the current stream."""
    stream, inside = device.stream("test"), []
    device.run(stream, partial(delay, device))
    device.run(stream, lambda: inside.append(device.record(timed=True)))
    before = device.record(timed=True)
    device.synchronize()
    assert device is CPU or launches_block(device) or seconds_between(before, inside[0]) > 0


@on_every_device
def test_synchronizing_the_device_waits_for_every_stream(device: Device) -> None:
    streams = [device.stream(str(number)) for number in range(3)]
    for stream in streams:
        device.run(stream, partial(delay, device))
    events = [device.record(stream) for stream in streams]
    device.synchronize()
    assert all(event.query() for event in events)


@where_streams_have_a_clock
def test_timed_events_measure_what_lies_between_them(device: Device) -> None:
    stream = device.stream("test")
    begin = device.record(stream, timed=True)
    device.run(stream, partial(delay, device))
    middle = device.record(stream, timed=True)
    end = device.record(stream, timed=True)
    end.synchronize()
    assert 0.005 < seconds_between(begin, middle) < 5
    assert 0 <= seconds_between(middle, end) < seconds_between(begin, middle)
    assert seconds_between(begin, end) == pytest.approx(seconds_between(begin, middle) + seconds_between(middle, end), abs=1e-4)


@on_every_device
def test_random_states_can_be_restored_again_and_again(device: Device) -> None:
    states = RandomSource(device).capture()
    drawn = [torch.rand(8, device=where) for where in (device.where, "cpu")]
    for _ in range(2):
        RandomSource(device).restore(states)
        again = [torch.rand(8, device=where) for where in (device.where, "cpu")]
        assert all(torch.equal(one, other) for one, other in zip(drawn, again, strict=True))


@on_every_device
def test_host_memory_is_locked_and_unlocked(device: Device) -> None:
    for _ in range(2):
        memory = torch.zeros(1 << 16, dtype=torch.uint8)
        device.lock(memory)
        assert memory.is_pinned() == (device.where.type == "cuda")
        device.unlock(memory)
        device.synchronize()
        assert not memory.is_pinned()


def test_unlocking_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab ends in a destructor: it synchronised the device, in the middle of a step, and on a GPU behind a receive that nobody
    had answered yet. Memory stays locked until the events behind everything that might use it are reached."""
    reached, unlocked = [False], list[int]()

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: object) -> None: ...

        def query(self) -> bool:
            return reached[0]

    def synchronize(where: object) -> None:
        raise AssertionError("it waits for the device")

    runtime_of_cuda = SimpleNamespace(cudaHostUnregister=unlocked.append)
    answers = {"Event": Event, "synchronize": synchronize, "cudart": lambda: runtime_of_cuda}
    answers["current_stream"] = lambda where: "compute"
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    device, memory = CudaDevice(torch.device("cuda", 0)), [torch.zeros(8), torch.zeros(8)]
    device._streams["offload"] = SimpleNamespace()  # type: ignore[assignment]
    device.unlock(memory[0])
    assert unlocked == []
    reached[0] = True
    device.unlock(memory[1])
    assert unlocked == [one.data_ptr() for one in memory]


def driver(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> list[str]:
    """A CUDA driver, whose calls it notes."""
    called = list[str]()

    def create(stream: Any, flags: int) -> int:
        assert flags == 1, "a stream that waits for the default stream"
        assert called[-1] == "synchronize", "torch's context may not be the current one"
        called.append("cuStreamCreate")
        stream._obj.value = 4096 + len(called)
        return status

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuStreamCreate=create))
    monkeypatch.setattr(torch.cuda, "device", lambda where: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: called.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    return called


def test_copies_stood_behind_a_receive_on_a_stream_that_nccl_had_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out its 32 streams in turns, to NCCL's groups as well. Ours come from the driver, and one name has one."""
    called, device = driver(monkeypatch), CudaDevice(torch.device("cuda", 0))
    ours: list[Any] = [device.stream(name) for name in ("offload", "reload", "offload")]
    assert ours == [4096 + 2, 4096 + 4, 4096 + 2]
    assert called == ["synchronize", "cuStreamCreate"] * 2


def test_a_stream_that_the_driver_does_not_make_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, status=201)
    with pytest.raises(RuntimeError, match="cuStreamCreate returned 201"):
        CudaDevice(torch.device("cuda", 0)).stream("offload")


def test_a_device_is_one_object() -> None:
    assert device_for(torch.device("cpu")) is CPU
    assert CPU.where == torch.zeros(1).device
    assert present_device().where.type == ("cuda" if torch.cuda.is_initialized() else "cpu")


def test_only_the_seam_names_cuda() -> None:
    """Everything else of the runtime asks `runtime.device`, so that it runs on any implementation of that."""
    here = Path(str(runtime.__file__)).parent
    naming = {str(file.relative_to(here)) for file in here.rglob("*.py") if "torch.cuda" in file.read_text()}
    assert naming == {"device.py"}
