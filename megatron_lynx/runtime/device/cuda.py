"""A CUDA device: torch's streams and events. No other file of the runtime names `torch.cuda`.

The host waits in `synchronize` and nowhere else. Memory that is no longer to be page-locked may still be read by a copy: it is
unlocked when the device has passed what it was given before, which is looked at whenever more memory is locked or unlocked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from megatron_lynx.runtime.device.device import Device, Event, Stream


@final
class CudaEvent(Event):
    """One of torch's, recorded on a stream."""

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
    """One of torch's. Work is issued at once, by the calling thread, while this is its current stream."""

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
        self._streams: set[torch.cuda.Stream] = set()
        """All that were ever made, of torch's few."""
        self._unlocking: list[tuple[Tensor, list[CudaEvent]]] = []
        """Memory that goes when these events are reached."""

    @property
    def current(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.where))

    def stream(self, name: str) -> Stream:
        stream = torch.cuda.Stream(self.where)
        self._streams.add(stream)
        return CudaStream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)
        self._unlock_passed()

    def random_states(self) -> tuple[Tensor, ...]:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.where)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state(states[1], self.where)

    def lock(self, memory: Tensor) -> None:
        self._unlock_passed()
        with _on_node_of(self.where):
            status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status != 0:
            raise RuntimeError(f"cudaHostRegister returned {status}")

    def unlock(self, memory: Tensor) -> None:
        streams = {*self._streams, torch.cuda.current_stream(self.where)}
        self._unlocking.append((memory, [CudaEvent(stream, timed=False) for stream in streams]))
        self._unlock_passed()

    def _unlock_passed(self) -> None:
        """Whatever nothing that is under way can use any more."""
        waiting, self._unlocking = self._unlocking, []
        for memory, events in waiting:
            if all(event.done for event in events):
                torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
            else:
                self._unlocking.append((memory, events))


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
