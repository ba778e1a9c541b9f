"""A CUDA device: torch's events, and streams that are nobody else's. Only `device` and this file name `torch.cuda`.

The host waits in `synchronize` and `within`, and nowhere else. Memory that is no longer to be page-locked may still be read by a
copy: it is unlocked when the device has passed what it was given before, which is looked at whenever more memory is locked or
unlocked.

Why streams of its own:

    a stream of torch's    one of 32 of a pool, in turns: the 33rd that anybody asks for is the first again
    NCCL's groups          take theirs from the same pool, one for each communicator
    a copy on an alias     stands behind a receive that nobody has answered yet, and with it what waits for the copy

So the driver is asked for one, on the device's primary context, which is torch's. Not CUDA's runtime: a torch may have it linked
in, where nobody else finds it, and torch's binding (`cudart().cudaStreamCreate`) makes streams that wait for the default stream,
where torch computes. A stream lives as long as the process: torch's allocator and events may refer to it at any time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from megatron_lynx.runtime.device import Device, Event, Stream

log = logging.getLogger(__name__)

DRIVER = "libcuda.so.1"
NON_BLOCKING = 1
"""`CU_STREAM_NON_BLOCKING`: it does not wait for the default stream, nor that one for it."""

LOOK_EVERY_S = 0.001
"""How often the host looks where it waits for a time only."""


@final
class CudaEvent(Event):
    """An event of torch's, recorded on a stream."""

    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)
        self.event.record(stream)

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def within(self, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while not self.done and time.monotonic() < deadline_s:
            time.sleep(LOOK_EVERY_S)
        return self.done

    def seconds_since(self, begin: Event) -> float:
        assert isinstance(begin, CudaEvent)
        return float(begin.event.elapsed_time(self.event)) / 1e3


@final
class CudaStream(Stream):
    """A stream of torch's. Work is issued at once, by the calling thread, while this is its current stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def record(self, *, timed: bool = False) -> Event:
        return CudaEvent(self._stream, timed)

    def synchronize(self) -> None:
        self._stream.synchronize()

    close = synchronize


@final
class CudaDevice(Device):
    """One GPU."""

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._streams: dict[str, torch.cuda.Stream] = {}
        """All streams that were ever made, by name."""
        self._behind: list[tuple[Callable[[], object], list[CudaEvent]]] = []
        """Functions to be called, each when its events are reached."""

    @property
    def current(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.where))

    def stream(self, name: str) -> Stream:
        if name not in self._streams:
            self._streams[name] = self._new_stream(name)
        return CudaStream(self._streams[name])

    def _new_stream(self, name: str) -> torch.cuda.Stream:
        try:
            handle = new_stream(self.where.index or 0)
        except (OSError, RuntimeError, AttributeError) as error:
            log.warning("%s: no stream of its own (%s), so one of torch's 32, which a group of NCCL's may have, too", name, error)
            return torch.cuda.Stream(self.where)
        return torch.cuda.ExternalStream(handle, device=self.where)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)
        self._look_back()

    def hold(self, held: object, until: Event) -> None:
        assert isinstance(until, CudaEvent)
        self._behind.append((partial(_let_go, held), [until]))

    def random_states(self) -> tuple[Tensor, ...]:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.where)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state(states[1], self.where)

    def lock(self, memory: Tensor) -> None:
        self._look_back()
        with _on_node_of(self.where):
            status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status != 0:
            raise RuntimeError(f"cudaHostRegister returned {status}")

    def unlock(self, memory: Tensor) -> None:
        streams = {*self._streams.values(), torch.cuda.current_stream(self.where)}
        events = [CudaEvent(stream, timed=False) for stream in streams]
        self._behind.append((partial(_unregister, memory), events))
        self._look_back()

    def _look_back(self) -> None:
        """Do what was to be done behind events that are reached by now."""
        behind, self._behind = self._behind, []
        for do, events in behind:
            if all(event.done for event in events):
                do()
            else:
                self._behind.append((do, events))


def _let_go(held: object) -> None:
    """It was held until now."""


def _unregister(memory: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


@contextmanager
def _on_node_of(where: torch.device) -> Iterator[None]:
    """Page-locking touches the pages, and they come from the node of the processor that does: let it be the device's own."""
    processors = _processors_near(where)
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _processors_near(where: torch.device) -> set[int]:
    """The processors of the device's NUMA node on which this process may run; none where the machine does not say."""
    facts: Any = torch.cuda.get_device_properties(where)
    if not hasattr(facts, "pci_bus_id"):  # before torch 2.8
        return set()
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices", address, "local_cpulist")
    if not listed.exists() or not hasattr(os, "sched_getaffinity"):
        return set()
    spans = [part.split("-") for part in listed.read_text().strip().split(",") if part]
    near = {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
    return near & os.sched_getaffinity(0)


def new_stream(device: int, driver: Any = None) -> int:
    """The handle of a new stream of a device, by CUDA's number. `driver`: its library, for tests.

    Raises `OSError` where there is no driver, and `RuntimeError` with CUDA's status where it makes none.
    """
    library = driver or ctypes.CDLL(DRIVER)
    context, stream = ctypes.c_void_p(), ctypes.c_void_p()
    _call(library, "cuInit", 0)
    _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(library, "cuCtxPushCurrent_v2", context)
    try:
        _call(library, "cuStreamCreate", ctypes.byref(stream), NON_BLOCKING)
    finally:
        _call(library, "cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    assert stream.value, "a status of success, and no stream"
    return stream.value


def _call(library: Any, name: str, *arguments: Any) -> None:
    if (status := getattr(library, name)(*arguments)) != 0:
        raise RuntimeError(f"{name} returned {status}")
