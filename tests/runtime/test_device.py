"""What every device promises: streams run in order and beside each other, and whoever waits for an event comes behind it."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lynx import runtime
from megatron_lynx.runtime import device as device_module
from megatron_lynx.runtime.device import CudaDevice, Device, device_for, new_stream, present_device
from tests.runtime.devices import CPU, delay, launches_block, on_every_device, under_way, where_streams_have_a_clock
from tests.runtime.devices import device as device


def numbers(device: Device, value: int) -> Tensor:
    return torch.full((4096,), value, device=device.where)


@on_every_device
def test_a_stream_runs_in_order_and_the_host_goes_on(device: Device) -> None:
    target, stream = numbers(device, 0), device.stream("test")
    target.add_(0).mul_(1)  # on a GPU the first launch of a kernel may wait for the device
    stream.wait(device.current.record())
    stream.run(partial(delay, device))
    for _ in range(100):
        stream.run(partial(target.add_, 1))
        stream.run(partial(target.mul_, -1))
    over = stream.record()
    assert under_way(over, device)
    over.synchronize()
    assert over.done
    assert set(target.tolist()) == {0}


@on_every_device
def test_a_stream_waits_for_another_ones_event(device: Device) -> None:
    source, target = numbers(device, 0), numbers(device, 0)
    first, second = device.stream("first"), device.stream("second")
    for stream in (first, second):
        stream.wait(device.current.record())
    first.run(partial(delay, device))
    first.run(partial(source.fill_, 7))
    second.wait(first.record())
    second.run(partial(target.copy_, source))
    waits_too, unheld = second.record(), device.stream("third").record()
    unheld.synchronize()
    assert under_way(waits_too, device), "only who waits is held up"
    second.record().synchronize()
    assert set(target.tolist()) == {7}


@on_every_device
def test_a_stream_comes_behind_what_compute_was_given(device: Device) -> None:
    source, target, stream = numbers(device, 0), numbers(device, 0), device.stream("test")
    device.synchronize()
    device.current.run(partial(delay, device))
    source.fill_(7)
    stream.wait(device.current.record())
    stream.run(partial(target.copy_, source))
    stream.record().synchronize()
    assert set(target.tolist()) == {7}


@on_every_device
def test_compute_comes_behind_an_event_that_it_waits_for(device: Device) -> None:
    source, stream = numbers(device, 0), device.stream("test")
    stream.wait(device.current.record())
    stream.run(partial(delay, device))
    stream.run(partial(source.fill_, 7))
    device.current.wait(stream.record())
    assert set((source * 1).tolist()) == {7}


@where_streams_have_a_clock
def test_inside_a_stream_it_is_the_current_one(device: Device) -> None:
    """What times copies asks the current stream."""
    stream, inside = device.stream("test"), []
    stream.run(partial(delay, device))
    stream.run(lambda: inside.append(device.current.record(timed=True)))
    before = device.current.record(timed=True)
    device.synchronize()
    assert device is CPU or launches_block(device) or inside[0].seconds_since(before) > 0


@on_every_device
def test_synchronizing_the_device_waits_for_every_stream(device: Device) -> None:
    streams = [device.stream(str(number)) for number in range(3)]
    for stream in streams:
        stream.run(partial(delay, device))
    events = [stream.record() for stream in streams]
    device.synchronize()
    assert all(event.done for event in events)


@where_streams_have_a_clock
def test_timed_events_measure_what_lies_between_them(device: Device) -> None:
    stream = device.stream("test")
    begin = stream.record(timed=True)
    stream.run(partial(delay, device))
    middle = stream.record(timed=True)
    end = stream.record(timed=True)
    end.synchronize()
    assert 0.005 < middle.seconds_since(begin) < 5
    assert 0 <= end.seconds_since(middle) < middle.seconds_since(begin)
    assert end.seconds_since(begin) == pytest.approx(middle.seconds_since(begin) + end.seconds_since(middle), abs=1e-4)


@on_every_device
def test_random_states_can_be_restored_again_and_again(device: Device) -> None:
    states = device.random_states()
    drawn = [torch.rand(8, device=where) for where in (device.where, "cpu")]
    for _ in range(2):
        device.restore_random_states(states)
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
    answers |= {"Stream": lambda where: "a stream", "current_stream": lambda where: "compute"}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    device, memory = CudaDevice(torch.device("cuda", 0)), [torch.zeros(8), torch.zeros(8)]
    device.stream("offload")
    device.unlock(memory[0])
    assert unlocked == []
    reached[0] = True
    device.unlock(memory[1])
    assert unlocked == [one.data_ptr() for one in memory]


class Driver:
    """Answers as the CUDA driver does, and notes what it was asked. `fails`: the call that does not succeed."""

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.asked.append(name)
            if name == "cuStreamCreate":
                assert given[1] == 1, "a stream that waits for the default stream"
                given[0]._obj.value = 4096 + len(self.asked)
            return 201 if name == self._fails else 0

        return call


def test_a_stream_of_our_own_comes_from_the_driver() -> None:
    driver = Driver()
    assert new_stream(3, driver) == 4096 + 4
    assert driver.asked == ["cuInit", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuStreamCreate", "cuCtxPopCurrent_v2"]
    failing = Driver("cuStreamCreate")
    with pytest.raises(RuntimeError, match="cuStreamCreate returned 201"):
        new_stream(0, failing)
    assert failing.asked[-1] == "cuCtxPopCurrent_v2", "the context is left as it was"


def test_copies_stood_behind_a_receive_on_a_stream_that_nccl_had_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch hands out its 32 streams in turns, to NCCL's groups as well. Ours come from elsewhere, and one name has one."""
    pool = itertools.cycle(range(32))
    monkeypatch.setattr(torch.cuda, "Stream", lambda where: next(pool))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
    monkeypatch.setattr(device_module, "new_stream", lambda device: new_stream(device, driver))
    driver, device = Driver(), CudaDevice(torch.device("cuda", 0))
    ours = [device.stream(name)._stream for name in ("offload", "reload", "offload")]
    assert ours[0] == ours[2] != ours[1]
    assert not {*ours} & {*(torch.cuda.Stream(None) for _ in range(32))}


def test_without_the_driver_a_stream_is_one_of_torchs_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(device: int) -> int:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(torch.cuda, "Stream", lambda where: "one of 32")
    monkeypatch.setattr(device_module, "new_stream", none)
    assert CudaDevice(torch.device("cuda", 0)).stream("offload")._stream == "one of 32"
    assert caplog.messages == [
        "offload: no stream of its own (libcuda.so.1: cannot open shared object file), so one of torch's 32, which a group of "
        "NCCL's may have, too"
    ]


def test_a_device_is_one_object() -> None:
    assert device_for(torch.device("cpu")) is CPU
    assert CPU.where == torch.zeros(1).device
    assert present_device().where.type == ("cuda" if torch.cuda.is_initialized() else "cpu")


def test_only_the_seam_names_cuda() -> None:
    """Everything else of the runtime asks `runtime.device`, so that it runs on any implementation of that."""
    here = Path(str(runtime.__file__)).parent
    naming = {str(file.relative_to(here)) for file in here.rglob("*.py") if "torch.cuda" in file.read_text()}
    assert naming == {"device.py"}
