"""Streams of a CPU that are threads: each runs its work in order, in parallel with the calling thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import final

from megatron_lynx.runtime.device import Event

Work = Callable[[], object]


@final
class ThreadEvent(Event):
    """Reached when a thread gets to it."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._at_s = 0.0

    def reach(self) -> None:
        self._at_s = time.perf_counter()
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()


@final
class CallingThread:
    """Compute: its work is done when the call returns, and it waits on the host."""

    def run(self, work: Work) -> None:
        work()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def record(self, *, timed: bool = False) -> Event:
        event = ThreadEvent()
        event.reach()
        return event


@final
class ThreadStream:
    """A thread, which starts with the first work and ends when the stream is forgotten."""

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
        if not event.query():
            self.run(event.synchronize)

    def record(self, *, timed: bool = False) -> Event:
        event = ThreadEvent()
        self.run(event.reach)
        return event


def _serve(given: SimpleQueue[Work | None]) -> None:
    """A stream's thread. It refers to the queue only, so that a forgotten stream can go, and not to work that is done."""
    while (work := given.get()) is not None:
        work()
        del work
