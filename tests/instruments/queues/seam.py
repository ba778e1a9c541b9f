"""Notes what the runtime gives to streams of the device seam (`runtime/device`): copies to the host and back, their events."""

from __future__ import annotations

import functools
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
    replace(undo, device.Device, "wait", notes.wait(device.Device.wait))
    replace(undo, device.Device, "record", notes.record(device.Device.record))
    replace(undo, device.Device, "run", notes.run(device.Device.run))
    replace(undo, device.Event, "synchronize", notes.synchronize(device.Event.synchronize))
    replace(undo, device.Device, "synchronize", notes.synchronize_all(device.Device.synchronize))


class _Notes:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._thread = threading.get_ident()
        self._inside = False
        """Whether a call of a stream runs, whose calls of its own are not noted."""
        self._events: weakref.WeakKeyDictionary[device.Event, Event] = weakref.WeakKeyDictionary()

    def run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def uncounted(device: Any, stream: Any, work: Callable[[], object]) -> None:
            with _disable_current_modes():  # the copy is one kernel of its stream, and none of compute
                original(device, stream, work)

        return self._noted(uncounted, lambda result, device, stream, work: self._log.kernel("copy", _name(stream)))

    def wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(result: Any, device: Any, event: Any, stream: Any = None) -> None:
            if event in self._events:
                self._log.wait(self._events[event], _name(stream))

        return self._noted(original, note)

    def record(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(result: Any, device: Any, stream: Any = None, **kwargs: Any) -> None:
            self._events[result] = self._log.event(_name(stream))

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


def _name(stream: str | None) -> str:
    return COMPUTE if stream is None else f"copies, {stream}"
