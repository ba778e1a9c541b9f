"""A CPU as a device: compute is the calling thread, and each further stream is a thread, so that copies run beside compute."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

import torch
from torch import Tensor

from megatron_lynx.runtime.device.device import Device, Event, Stream

Work = Callable[[], object]


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
        """It is idle whenever somebody can ask."""

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
