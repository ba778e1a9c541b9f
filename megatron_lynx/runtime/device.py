"""Streams and events of a device, by which the runtime orders copies and compute, and spans and seconds between events.

A CPU's stream is the calling thread, its work has finished when the call returns, and its clock is the host's. `CudaDevice`
has those of a GPU; `tests/instruments/streams` a CPU whose copies run in threads, as late as they may.

Copies between a device and its host have one copier and one stream per direction, and this order (rule R9):

    compute  ── F k ──┬── B j ──────────────┬── F k+1 ──┬─ [3] ──   ── B k ──[4]──
    to host           └ [1] copies of k ──┐ │           │             ↑
    back                                  └───────────────[2] copies ─┘

 [1] a copy waits for all compute issued so far, so its source exists
 [2] and for the copies it must follow: a reload for its own copy out, a copy out for the last reader of its host memory
 [3] a copy holds its tensors until compute waits for it or its event is reached
 [4] a backward waits for the copies that it needs, on the compute stream
 [5] where the plan keeps copies and messages apart, a message waits for all copies issued so far, and the next copies are issued
     when the exchange is over

Copies wait only for copies issued before them, and never for a message, so they cannot deadlock. A step that fails waits for
none: its copies may be queued after compute that waits for a dead peer. Their memory is held until they are over.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, final

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.timeline import Span, SpanKind, name_of, seconds_between


class Event:
    """A point in a stream, reached when all work issued to the stream before it has finished. A GPU's is a `torch.cuda.Event`."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        """Return whether it is reached."""
        return True

    def synchronize(self) -> None:
        """Wait for it on the host."""

    def elapsed_time(self, end: Any) -> float:
        """Return milliseconds on the device's clock. Both events must be reached, and recorded as timed."""
        return float(end._at_s - self._at_s) * 1e3


class Device:
    """One device that computes, and the memory of its host. `stream`: what `Device.stream` returned; by default the stream on
    which the calling thread computes, inside `run` the one that runs."""

    def __init__(self, where: torch.device) -> None:
        self.where = where

    def stream(self, name: str) -> Any:
        """Return the stream of that name, which no other library uses. It runs its work in order, in parallel with others."""
        return name

    def run(self, stream: Any, work: Callable[[], object]) -> None:
        """Call `work`, which issues to this stream. Errors of `work` are raised here."""
        work()

    def wait(self, event: Event, stream: Any = None) -> None:
        """Start work issued from now on after the event."""

    def record(self, stream: Any = None, *, timed: bool = False) -> Event:
        """Return the point after the work issued so far. `timed`: needed for `timeline.seconds_between`."""
        return Event()

    def synchronize(self) -> None:
        """Wait on the host until every stream has finished the work issued so far."""

    def hold(self, held: object, until: Event) -> None:
        """Keep a reference to an object until the event is reached."""

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The default generators of code on this device."""
        return (torch.default_generator,)

    def lock(self, memory: Tensor) -> None:
        """Page-lock host memory for asynchronous copies. Raises `RuntimeError` if that fails."""

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock` when the copies issued so far have finished. Destructors call it: it never waits."""


@final
class CudaDevice(Device):
    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._pending: list[tuple[Callable[[], object], list[Event]]] = []
        """Functions to call once all of their events are reached."""

    def stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:
            self._streams[name] = torch.cuda.ExternalStream(new_stream(self.where), device=self.where)
        return self._streams[name]

    def run(self, stream: torch.cuda.Stream, work: Callable[[], object]) -> None:
        with torch.cuda.stream(stream):
            work()

    def wait(self, event: Any, stream: torch.cuda.Stream | None = None) -> None:
        (stream or torch.cuda.current_stream(self.where)).wait_event(event)

    def record(self, stream: torch.cuda.Stream | None = None, *, timed: bool = False) -> Any:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream or torch.cuda.current_stream(self.where))
        return event

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)
        self._poll()

    def hold(self, held: object, until: Event) -> None:
        self._pending.append((partial(id, held), [until]))  # a no-op call that refers to it

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        return torch.default_generator, torch.cuda.default_generators[self.where.index]

    def lock(self, memory: Tensor) -> None:
        self._poll()
        status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        if status != 0:
            raise RuntimeError(f"cudaHostRegister returned {status}")

    def unlock(self, memory: Tensor) -> None:
        events = [self.record(stream) for stream in (None, *self._streams.values())]
        self._pending.append((lambda: torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()), events))
        self._poll()

    def _poll(self) -> None:
        pending, self._pending = self._pending, []
        for call, events in pending:
            if all(event.query() for event in events):
                call()
            else:
                self._pending.append((call, events))


def new_stream(where: torch.device) -> int:
    """Return the handle of a new stream of the driver. Raises `RuntimeError` with CUDA's status.

    Torch hands out a pool of 32 in turns, also to NCCL's communicators, where a copy would queue behind a receive. These live as
    long as the process: torch's allocator and events may refer to them at any time.
    """
    stream, driver = ctypes.c_void_p(), ctypes.CDLL("libcuda.so.1")
    with torch.cuda.device(where):
        torch.cuda.synchronize()  # makes torch's context the driver's current one
        status = driver.cuStreamCreate(ctypes.byref(stream), 1)  # CU_STREAM_NON_BLOCKING: the default stream does not wait
    if status != 0 or stream.value is None:
        raise RuntimeError(f"cuStreamCreate returned {status}")
    return stream.value


def device_for(where: torch.device) -> Device:
    """Return the device of tensors created on `where`, the same object each time."""
    return _made(torch.empty(0, device=where).device)


def present_device() -> Device:
    """Return the current CUDA device if CUDA is in use, else the CPU."""
    return device_for(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@cache
def _made(where: torch.device) -> Device:
    if where.type == "cuda":
        return CudaDevice(where)
    return Device(where)


class Clock:
    """Pairs of events on the current stream. `runs`: whether they are recorded."""

    def __init__(self, device: Device, *, runs: bool = False) -> None:
        self.runs = runs
        self._device = device
        self._timed: deque[tuple[Any, Event, Event]] = deque()

    def begin(self) -> Event | None:
        return self._device.record(timed=True) if self.runs else None

    def end(self, what: Any, begin: Event | None) -> None:
        if begin is not None:
            self._timed.append((what, begin, self._device.record(timed=True)))

    def take(self, *, exact: bool = True) -> list[tuple[Any, float]]:
        """Return (label, seconds) since the last call. `exact` waits for the device; otherwise unreached pairs stay."""
        seconds = []
        while self._timed and (exact or self._timed[0][2].query()):
            what, begin, end = self._timed.popleft()
            end.synchronize()
            seconds.append((what, seconds_between(begin, end)))
        return seconds


class Trace(Clock):
    """Spans that began while it runs."""

    _origin: Event | None = None

    def start(self) -> None:
        self._timed.clear()
        self.runs, self._origin = True, self._device.record(timed=True)

    def stop(self) -> list[Span]:
        """Return the spans since `start`, sorted by begin; waits for the device. Empty if it was never started."""
        if self._origin is None:
            return []
        self.runs = False
        self._device.synchronize()
        since, timed = self._origin, list(self._timed)
        self._timed.clear()
        spans = [Span(kind, seconds_between(since, at), seconds_between(since, end), *of) for (kind, *of), at, end in timed]
        return sorted(spans, key=lambda span: (span.start_s, -span.end_s))

    def add(
        self, kind: SpanKind, begin: Event | None, half: FrameKey | None = None, micro_batch: int | None = None, window: str = ""
    ) -> None:
        """End a span now."""
        if begin is not None:
            layer, name = half or (None, None)
            self.end((kind, layer, name, micro_batch, window or None, name_of(kind, layer, name, window)), begin)


Pair = tuple[Tensor, Tensor]
"""Target and source, of the same size."""


@final
@dataclass(eq=False)
class Copy:
    """One copy of several tensors of a micro-batch, which is counted from 0 over the run."""

    micro_batch: int
    pairs: Sequence[Pair] | None
    """Is None once compute may reuse their memory."""
    event: Event

    @property
    def done(self) -> bool:
        """Whether it is over, or compute waits for it. Decides when memory is freed, never which tasks run (rule R1)."""
        if self.pairs is not None and self.event.query():
            self.release()
        return self.pairs is None

    def release(self) -> None:
        self.pairs = None  # [3]


@final
class Copier:
    """Copies in one direction. Tests replace `move` to inject faults."""

    def __init__(self, direction: Literal["offload", "reload"], device: Device, trace: Trace) -> None:
        self.direction = direction
        self.move: Callable[[Tensor, Tensor], object] = partial(Tensor.copy_, non_blocking=True)
        self._device = device
        self._trace = trace
        self._stream = device.stream(direction)
        self._bytes = 0
        self._holding: deque[Copy] = deque()
        self._waits = Clock(device, runs=True)
        self._waited_s = 0.0

    def start(self, pairs: Sequence[Pair], micro_batch: int, after: Iterable[Copy | None] = ()) -> Copy:
        """Copy after the compute issued so far and the copies `after`. Errors of the device are raised here."""
        self.settle()
        self._device.wait(self._device.record(), self._stream)  # [1]
        for before in dict.fromkeys(copy for copy in after if copy is not None):
            self._device.wait(before.event, self._stream)  # [2]
        try:
            self._device.run(self._stream, partial(self._move_all, pairs, micro_batch))
        finally:
            self._holding.append(Copy(micro_batch, pairs, self._device.record(self._stream)))
        self._bytes += sum(target.nbytes for target, _ in pairs)
        return self._holding[-1]

    def _move_all(self, pairs: Sequence[Pair], micro_batch: int) -> None:
        begin = self._trace.begin()
        for target, source in pairs:
            self.move(target, source)
        self._trace.add(self.direction, begin, micro_batch=micro_batch)

    def give_way(self) -> None:
        """Let work issued from now on, such as a message, wait for all copies issued so far."""  # [5]
        if self._holding:
            self.wait(self._holding[-1])

    def wait(self, copy: Copy) -> None:
        """Let compute issued from now on wait for this copy."""
        if not copy.done:
            begin, traced = self._waits.begin(), self._trace.begin()
            self._device.wait(copy.event)  # [4]
            self._trace.add("copy_wait", traced, micro_batch=copy.micro_batch)
            self._waits.end("copy", begin)
            copy.release()

    def settle(self) -> None:
        """Drop the tensors of finished copies, and add up finished waits."""
        while self._holding and self._holding[0].done:
            self._holding.popleft()
        self._add_up(exact=False)

    def close(self) -> None:
        """Keep the tensors of unfinished copies alive until they are over."""
        self.settle()
        for copy in self._holding:
            self._device.hold(copy, copy.event)

    def take_bytes(self) -> int:
        taken, self._bytes = self._bytes, 0
        return taken

    def take_waited_s(self, *, exact: bool = True) -> float:
        """Return seconds for which compute waited for copies since the last call; `exact` as in `Clock.take`."""
        self._add_up(exact)
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _add_up(self, exact: bool) -> None:
        self._waited_s += sum(seconds for _, seconds in self._waits.take(exact=exact))


def copiers_for(device: Device, trace: Trace) -> tuple[Copier, Copier]:
    return Copier("offload", device, trace), Copier("reload", device, trace)
