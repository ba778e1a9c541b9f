"""Streams and events of a device, by which the runtime orders copies and compute.

   compute    ── a ──┬──────────────── b ────────────────┬── current.wait(over) ── c
                     │ [1]                               │ [3]
   a stream          └ wait(current.record()) ── run(copy) ── record() = over

[1] the stream waits for the compute issued before: it reads what exists
[2] the host continues; it blocks in `synchronize` only
[3] compute issued from now on waits for the copy

A CPU's stream is the calling thread, its work has finished when the call returns, and its clock is the host's. `cuda` derives
those of a GPU. `tests/instruments/streams` derives a CPU whose copies run in threads, as late as they may.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Work = Callable[[], object]


class Event:
    """A point in a stream, reached when all work issued to the stream before it has finished."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    @property
    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait for it on the host."""

    def seconds_since(self, begin: Event) -> float:
        """Return the seconds on the device's clock. Both events must be reached, and recorded as timed."""
        return self._at_s - begin._at_s


class Stream:
    """Runs its work in order, in parallel with other streams."""

    def run(self, work: Work) -> None:
        """Call `work`, which issues to this stream. Errors of `work` are raised here."""
        work()

    def wait(self, event: Event) -> None:
        """Start work issued from now on after the event."""

    def record(self, *, timed: bool = False) -> Event:
        """Return the point after the work issued so far. `timed`: needed for `seconds_since`."""
        return Event()


class Device:
    """One device that computes, and the memory of its host."""

    def __init__(self, where: torch.device) -> None:
        self.where = where

    @property
    def current(self) -> Stream:
        """The stream on which the calling thread computes. Inside `Stream.run` it is that stream."""
        return CALLING_THREAD

    def stream(self, name: str) -> Stream:
        """Return the stream of that name, which no other library uses."""
        return Stream()

    def synchronize(self) -> None:
        """Wait on the host until every stream has finished the work issued so far."""

    def hold(self, held: object, until: Event) -> None:
        """Keep a reference to an object until the event is reached."""

    def random_states(self) -> tuple[Tensor, ...]:
        """Return states of the default generators of code on this device, which later draws do not change."""
        return (torch.get_rng_state(),)

    def restore_random_states(self, states: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(*states)

    def lock(self, memory: Tensor) -> None:
        """Page-lock host memory for asynchronous copies. Raises `RuntimeError` if that fails."""

    def unlock(self, memory: Tensor) -> None:
        """Undo `lock` when the copies issued so far have finished. Destructors call it: it never waits."""


CALLING_THREAD = Stream()


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
    return Device(where)
