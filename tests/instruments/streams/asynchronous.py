"""A device whose copies run in parallel with compute as on a GPU, though all of it is a CPU (`megatron_lynx.runtime.device`).

    calling thread      computes at once; it issues work for the streams, as the host of a GPU does
    one thread each     for every further stream: it moves raw memory, as late as it may. Most copies begin only when somebody
                        waits, and then after a random time from a seed (`move`)

`Device.run(stream, work)` calls `work` at once, on the calling thread, with this stream as the current one. A copy that `work`
asks for is caught at torch's dispatcher and given to the stream's thread. So the real copier, trace and host pool run as on CUDA.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lynx.runtime.device import Device, Event
from tests.instruments.posted import asked_at
from tests.instruments.streams.listener import COMPUTE, StreamListener
from tests.instruments.streams.move import Move, poison
from tests.instruments.streams.threads import CallingThread, ThreadStream

LONGEST_S = 0.002
"""Copies are late by up to so many seconds."""

AT_ONCE = 0.3
"""How many of all copies begin before anybody waits."""


@final
class AsynchronousEvent(Event):
    """Reached when the stream's thread gets to it."""

    def __init__(self, reached: Event, point: Any, device: AsynchronousDevice) -> None:
        self.reached = reached
        self.point = point
        self._device = device

    def query(self) -> bool:
        """Never sooner than the host knows without asking: who asks too early, and finds it reached by chance, is not helped."""
        return self.reached.query() and self._device.listener.host_knows(self.point)

    def synchronize(self) -> None:
        self._device.hurry()
        self.reached.synchronize()
        self._device.listener.host_waits(self.point)

    def elapsed_time(self, end: Any) -> float:
        assert isinstance(end, AsynchronousEvent)
        return self.reached.elapsed_time(end.reached)


@final
class AsynchronousStream:
    """A stream of an `AsynchronousDevice`; `does`: what does the work, the calling thread or one of its own."""

    def __init__(self, name: str, does: CallingThread | ThreadStream, device: AsynchronousDevice) -> None:
        self.name = name
        self._does = does
        self._device = device

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy, behind what was given before."""
        move = self._device.made(self, target, source)
        self._device.listener.moves(self.name, move)
        self._does.run(move.run)

    def wait(self, event: Event) -> None:
        assert isinstance(event, AsynchronousEvent)
        self._device.listener.stream_waits(self.name, event.point)
        if self.name == COMPUTE:
            self._device.hurry()
        self._does.wait(event.reached)

    def record(self, *, timed: bool = False) -> Event:
        return AsynchronousEvent(self._does.record(timed=timed), self._device.listener.recorded(self.name), self._device)


@final
class AsynchronousDevice(Device):
    """The CPU, with streams that are beside it. `found`: what its moves found wrong so far."""

    def __init__(self, where: torch.device, seed: int, listener: StreamListener | None = None) -> None:
        super().__init__(where)
        self.listener = listener or StreamListener()
        self.moved = 0
        """How many copies were given to its streams."""
        self._delays = random.Random(seed)
        self._compute = AsynchronousStream(COMPUTE, CallingThread(), self)
        self._current = self._compute
        self._streams: list[AsynchronousStream] = []
        self._under_way: list[Move] = []
        self._found: list[str] = []

    @property
    def found(self) -> list[str]:
        self._look_back()
        return self._found

    def stream(self, name: str) -> AsynchronousStream:
        stream = AsynchronousStream(name, ThreadStream(name), self)
        self._streams.append(stream)
        return stream

    def run(self, stream: AsynchronousStream | None, work: Callable[[], object]) -> None:
        with self.issuing_on(stream or self._compute):
            work()

    def wait(self, event: Event, stream: AsynchronousStream | None = None) -> None:
        (stream or self._current).wait(event)

    def record(self, stream: AsynchronousStream | None = None, *, timed: bool = False) -> Event:
        return (stream or self._current).record(timed=timed)

    @contextmanager
    def issuing_on(self, stream: AsynchronousStream) -> Iterator[None]:
        """The current stream is this one inside, and copies are given to it."""
        before, self._current = self._current, stream
        try:
            with _Caught(stream):
                yield
        finally:
            self._current = before

    def made(self, stream: AsynchronousStream, target: Tensor, source: Tensor) -> Move:
        """A copy that a stream is about to be given."""
        self._look_back()
        self.moved += 1
        if not any(move.touches(target) for move in self._under_way):
            poison(target)
        late_s = self._delays.choice([0.0, 0.0, self._delays.uniform(0, LONGEST_S)])
        move = Move(target, source, f"copy {self.moved} of {stream.name}, asked for at {asked_at()},", late_s)
        if self._delays.random() < AT_ONCE:
            move.may_begin.set()
        self._under_way.append(move)
        return move

    def hurry(self) -> None:
        """Somebody waits: whatever was asked for so far may begin."""
        for move in self._under_way:
            move.may_begin.set()

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.record().synchronize()
        self.listener.host_waits_for_all()

    def hold(self, held: object, until: Event) -> None:
        """The moves hold their tensors. They may begin now: nothing waits for them any more."""
        self.hurry()

    def _look_back(self) -> None:
        """At the copies that are over; they are forgotten then."""
        over = [move for move in self._under_way if move.over]
        self._found += [found for move in over for found in move.found]
        self._under_way = [move for move in self._under_way if not move.over]


class _Caught(TorchDispatchMode):
    """What is copied inside is given to a stream; everything else runs at once."""

    def __init__(self, stream: AsynchronousStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._stream.move(args[0], args[1])
            return args[0]
        return func(*args, **(kwargs or {}))
