"""A CUDA device: torch's events, and streams from the driver. Only `device` and this file name `torch.cuda`.

Copies do not run on torch's streams: torch hands out a pool of 32 in turns, also to NCCL's communicators, and a copy on a stream
shared with NCCL would queue behind a receive. The driver creates streams on the device's primary context, which is torch's; those
of torch's binding of the runtime synchronize with the default stream, where torch computes. A stream lives as long as the
process, because torch's allocator and events may refer to it at any time.
"""

from __future__ import annotations

import ctypes
import logging
import os
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
"""`CU_STREAM_NON_BLOCKING`: no implicit synchronization with the default stream."""


@final
class CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        self.event = torch.cuda.Event(enable_timing=timed)
        self.event.record(stream)

    @property
    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, begin: Event) -> float:
        assert isinstance(begin, CudaEvent)
        return float(begin.event.elapsed_time(self.event)) / 1e3


@final
class CudaStream(Stream):
    """A stream of torch's. The calling thread issues work at once, with this as its current stream."""

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


@final
class CudaDevice(Device):
    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._pending: list[tuple[Callable[[], object], list[CudaEvent]]] = []
        """Functions to call once all of their events are reached."""

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
        self._poll()

    def hold(self, held: object, until: Event) -> None:
        assert isinstance(until, CudaEvent)
        self._pending.append((partial(id, held), [until]))  # a no-op call that refers to it

    def random_states(self) -> tuple[Tensor, ...]:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.where)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state(states[1], self.where)

    def lock(self, memory: Tensor) -> None:
        self._poll()
        with _on_node_of(self.where):
            status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status != 0:
            raise RuntimeError(f"cudaHostRegister returned {status}")

    def unlock(self, memory: Tensor) -> None:
        streams = {*self._streams.values(), torch.cuda.current_stream(self.where)}
        events = [CudaEvent(stream, timed=False) for stream in streams]
        self._pending.append((lambda: torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()), events))
        self._poll()

    def _poll(self) -> None:
        pending, self._pending = self._pending, []
        for call, events in pending:
            if all(event.done for event in events):
                call()
            else:
                self._pending.append((call, events))


@contextmanager
def _on_node_of(where: torch.device) -> Iterator[None]:
    """Page-locking allocates the pages on the calling processor's NUMA node: make it the device's."""
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
    """Processors of the device's NUMA node on which this process may run; empty if the machine does not list them."""
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
    """Return the handle of a new stream. Raises `OSError` without a driver, `RuntimeError` with CUDA's status on failure."""
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
