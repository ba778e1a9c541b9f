"""Streams and events of a device: the runtime orders copies and compute through these protocols.

   compute    ── a ──┬──────────────── b ────────────────┬── current.wait(over) ── c
                     │ [1]                               │ [3]
   a stream          └ wait(current.record()) ── run(copy) ── record() = over

[1] the stream waits for the compute issued before: it reads what exists
[2] the host continues; it blocks in `synchronize` only
[3] compute issued from now on waits for the copy

                CUDA (`cuda`)                              CPU
   Stream       a CUDA stream                              the calling thread, which copies at once
   current      torch's current stream of this thread      the same
   Event        a CUDA event                               always reached
   the clock    the device's                               the host's

`tests/instruments/streams` has a third one: a CPU whose copies run in threads, as late as they may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Protocol, final

import torch
from torch import Tensor

Work = Callable[[], object]


class Event(Protocol):
    """A point in a stream, reached when all work issued to the stream before it has finished."""

    @property
    def done(self) -> bool:
        """Whether it is reached by now."""

    def synchronize(self) -> None:
        """Wait for it on the host."""

    def seconds_since(self, begin: Event) -> float:
        """Seconds on the device's clock; both events are reached, and were recorded as timed."""


class Stream(Protocol):
    """Runs its work in order, in parallel with other streams."""

    def run(self, work: Work) -> None:
        """Call `work`, which issues to this stream. What `work` raises is raised here."""

    def wait(self, event: Event) -> None:
        """Work issued from now on starts after the event."""

    def record(self, *, timed: bool = False) -> Event:
        """Return the point after the work issued so far. `timed`: needed for `seconds_since`."""


class Device(Protocol):
    """One device that computes, and the memory of its host."""

    where: torch.device

    @property
    def current(self) -> Stream:
        """The stream on which the calling thread computes. Inside `Stream.run` it is that stream."""

    def stream(self, name: str) -> Stream:
        """The stream of that name, which no other library uses."""

    def synchronize(self) -> None:
        """Wait on the host until every stream has finished the work issued so far."""

    def hold(self, held: object, until: Event) -> None:
        """Keep a reference to an object until the event is reached."""

    def random_states(self) -> tuple[Tensor, ...]:
        """States of the default generators that code on this device may draw from. Later draws do not change them."""

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        """Set the generators to these states."""

    def lock(self, memory: Tensor) -> None:
        """Page-lock host memory for asynchronous copies. Raises `RuntimeError` if that fails."""

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock` when the copies issued so far have finished. Destructors call it: it never waits."""


@final
class CpuEvent(Event):
    """Reached when it is recorded."""

    done = True

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def synchronize(self) -> None:
        """Already reached."""

    def seconds_since(self, begin: Event) -> float:
        assert isinstance(begin, CpuEvent)
        return self._at_s - begin._at_s


@final
class CpuStream(Stream):
    """The calling thread."""

    def run(self, work: Work) -> None:
        work()

    def wait(self, event: Event) -> None:
        """Already reached."""

    def record(self, *, timed: bool = False) -> Event:
        return CpuEvent()


@final
class CpuDevice(Device):
    """The CPU, whose memory is the host's."""

    current: Stream = CpuStream()

    def __init__(self, where: torch.device) -> None:
        self.where = where

    def stream(self, name: str) -> Stream:
        return CpuStream()

    def synchronize(self) -> None:
        """All work has finished when the call that did it returns."""

    def hold(self, held: object, until: Event) -> None:
        """All events are reached."""

    def random_states(self) -> tuple[Tensor, ...]:
        return (torch.get_rng_state(),)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(*states)

    def lock(self, memory: Tensor) -> None:
        """No copy needs it."""

    unlock = lock


def device_for(where: torch.device) -> Device:
    """Return the device of tensors created on `where`, the same object each time."""
    return _made(torch.empty(0, device=where).device)


def present_device() -> Device:
    """Return the current CUDA device if CUDA is in use, else the CPU."""
    return device_for(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@cache
def _made(where: torch.device) -> Device:
    if where.type == "cuda":
        from megatron_lynx.runtime.cuda import CudaDevice

        return CudaDevice(where)
    return CpuDevice(where)
