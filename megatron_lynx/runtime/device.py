"""The runtime's orders between copies and compute are written once, against this: a device with streams that wait for events.

   compute    ── a ──┬──────────────── b ────────────────┬── current.wait(over) ── c
                     │ [1]                               │ [3]
   a stream          └ wait(current.record()) ── run(copy) ── record() = over

[1] the stream comes behind what compute was given before: it reads what exists
[2] the host goes on: it waits in `synchronize` and `within` only, and on a CPU, where the host computes, in `current.wait`
[3] what compute is given from now on comes behind the copy

                CUDA (`cuda`)                              CPU, so that copies run beside compute there, too
   Stream       a CUDA stream                              a thread that runs what it is given, in order
   current      torch's current stream of this thread      the calling thread: what it was given is done
   Event        a CUDA event                               reached when the stream's thread gets to it
   the clock    the device's                               the host's
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import Protocol, final

import torch
from torch import Tensor

Work = Callable[[], object]


class Event(Protocol):
    """A point that a stream reaches when everything that it was given before is done."""

    @property
    def done(self) -> bool:
        """Whether it is reached by now."""

    def synchronize(self) -> None:
        """Wait for it on the host."""

    def within(self, seconds: float) -> bool:
        """Wait for it on the host, no longer than that; whether it is reached."""

    def seconds_since(self, begin: Event) -> float:
        """Seconds on the device's clock; both events are reached, and were recorded as timed."""


class Stream(Protocol):
    """Does what it is given, in that order, beside other streams."""

    def run(self, work: Work) -> None:
        """Do this behind what was given before. `work` issues it (CUDA) or does it (CPU), and must not raise."""

    def wait(self, event: Event) -> None:
        """What is given from now on comes behind the event."""

    def record(self, *, timed: bool = False) -> Event:
        """The point behind what was given so far. `timed`: its seconds are wanted."""

    def synchronize(self) -> None:
        """Wait on the host until everything given so far is done."""

    def close(self) -> None:
        """Nothing more is given; wait on the host for what was."""


class Device(Protocol):
    """One device that computes, and the memory of its host."""

    where: torch.device

    @property
    def current(self) -> Stream:
        """What the calling thread computes on. Inside `Stream.run` it is that stream."""

    def stream(self, name: str) -> Stream:
        """The stream of that name: nobody's but that of whoever asks for this name."""

    def synchronize(self) -> None:
        """Wait on the host until every stream has done what it was given so far."""

    def hold(self, held: object, until: Event) -> None:
        """Keep this until the event is reached, whoever else lets it go."""

    def random_states(self) -> tuple[Tensor, ...]:
        """States of the default generators that code on this device may draw from. Later draws do not change them."""

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        """Make these the present ones."""

    def lock(self, memory: Tensor) -> None:
        """Page-lock host memory, where that makes copies asynchronous. Raises `RuntimeError` where it cannot be done."""

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock` as soon as no copy that was asked for before is under way any more. Destructors call it: it never waits."""


@final
class CpuEvent(Event):
    """Reached when a thread gets to it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._at_s = 0.0

    def reach(self) -> None:
        self._at_s = time.perf_counter()
        self._reached.set()

    @property
    def done(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()

    def within(self, seconds: float) -> bool:
        return self._reached.wait(seconds)

    def seconds_since(self, begin: Event) -> float:
        assert isinstance(begin, CpuEvent)
        return self._at_s - begin._at_s


@final
class CallingThread(Stream):
    """Compute on a CPU: what was given is done, and who waits is the one who calls."""

    def run(self, work: Work) -> None:
        work()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record(self, *, timed: bool = False) -> Event:
        event = CpuEvent()
        event.reach()
        return event

    def synchronize(self) -> None:
        """There is nothing to wait for: it is idle whenever somebody can ask."""

    close = synchronize


@final
class ThreadStream(Stream):
    """A thread for what it is given. It begins with the first work, and ends with `close` or when the stream is forgotten."""

    def __init__(self, name: str) -> None:
        self._name = f"lynx-{name}"
        self._given: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._given.put, None)

    def run(self, work: Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._given,), name=self._name, daemon=True)
            self._thread.start()
        self._given.put(work)

    def wait(self, event: Event) -> None:
        if not event.done:
            self.run(event.synchronize)

    def record(self, *, timed: bool = False) -> Event:
        event = CpuEvent()
        self.run(event.reach)
        return event

    def synchronize(self) -> None:
        if self._thread is not None:
            self.record().synchronize()

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._given.put(None)
            thread.join()


def _serve(given: SimpleQueue[Work | None]) -> None:
    """A stream's thread. It refers to the queue only, so that a forgotten stream can go, and not to work that is done."""
    while (work := given.get()) is not None:
        work()
        del work


@final
class CpuDevice(Device):
    """The CPU, whose memory is the host's."""

    current: Stream = CallingThread()

    def __init__(self, where: torch.device) -> None:
        self.where = where
        self._streams: weakref.WeakSet[ThreadStream] = weakref.WeakSet()

    def stream(self, name: str) -> Stream:
        stream = ThreadStream(name)
        self._streams.add(stream)
        return stream

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    def hold(self, held: object, until: Event) -> None:
        """Nothing to do: the thread that is to do the work holds it."""

    def random_states(self) -> tuple[Tensor, ...]:
        return (torch.get_rng_state(),)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(*states)

    def lock(self, memory: Tensor) -> None:
        """Nothing to do: no copy needs it."""

    unlock = lock


def device_for(where: torch.device) -> Device:
    """The device on which a tensor lands that is put there: the same object each time."""
    return _made(torch.empty(0, device=where).device)


def present_device() -> Device:
    """The device that this process computes on: the current CUDA device where CUDA is in use, else the CPU."""
    return device_for(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@cache
def _made(where: torch.device) -> Device:
    if where.type == "cuda":
        from megatron_lynx.runtime.cuda import CudaDevice

        return CudaDevice(where)
    return CpuDevice(where)
