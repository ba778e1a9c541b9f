"""Notes what the runtime gives to streams of the device seam (`runtime/device`): copies to the host and back, their events."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from megatron_lynx.runtime import device
from tests.instruments.queues.log import COMPUTE, Event, Log
from tests.instruments.replacing import replace


def note_copies(undo: ExitStack, log: Log) -> None:
    """Note what the calling thread gives to streams, until `undo` is closed."""
    notes = _Notes(log)
    replace(undo, device.Stream, "wait", notes.wait(device.Stream.wait))
    replace(undo, device.Stream, "record", notes.record(device.Stream.record))
    replace(undo, device.Stream, "run", notes.run(device.Stream.run))
    replace(undo, device.Event, "synchronize", notes.synchronize(device.Event.synchronize))
    replace(undo, device.Device, "synchronize", notes.synchronize_all(device.Device.synchronize))


class _Notes:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._thread = threading.get_ident()
        self._inside = False
        """Whether a call of a stream runs, whose calls of its own are not noted."""
        self._events: weakref.WeakKeyDictionary[device.Event, Event] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()

    def run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def uncounted(stream: Any, work: Callable[[], object]) -> None:
            with _disable_current_modes():  # the copy is one kernel of its stream, and none of compute
                original(stream, work)

        return self._noted(uncounted, lambda result, stream, work: self._log.kernel("copy", self._name(stream)))

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(result: Any, stream: Any, event: Any) -> None:
            if event in self._events:
                self._log.wait(self._events[event], self._name(stream))

        return self._noted(original, note)

    def record(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(result: Any, stream: Any, **kwargs: Any) -> None:
            self._events[result] = self._log.event(self._name(stream))

        return self._noted(original, note)

    def synchronize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(result: Any, event: Any) -> None:
            if event in self._events:
                self._log.synchronize("synchronize of an event", [self._events[event]])

        return self._noted(original, note)

    def synchronize_all(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._noted(original, lambda result, device: self._log.synchronize("synchronize of the device"))

    def _noted(self, original: Callable[..., Any], note: Callable[..., Any]) -> Callable[..., Any]:
        """`original`, and behind it a note with what it returned; only of outer calls of the thread that is recorded."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._inside = True
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
            note(result, *args, **kwargs)
            return result

        return call

    def _name(self, stream: Any) -> str:
        if stream is device.CALLING_THREAD:
            return COMPUTE
        if stream not in self._names:
            self._names[stream] = f"copies {next(self._numbers)}"
        return self._names[stream]
