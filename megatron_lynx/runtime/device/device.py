"""The runtime's orders between copies and compute are written once, against this: a device with streams that wait for events.

   compute    ── a ──┬──────────────── b ────────────────┬── current.wait(over) ── c
                     │ [1]                               │ [3]
   a stream          └ wait(current.record()) ── run(copy) ── record() = over

[1] the stream comes behind what compute was given before: it reads what exists
[2] the host goes on: it waits in `synchronize` and `within` only, and on a CPU, where the host computes, in `current.wait`
[3] what compute is given from now on comes behind the copy

                CUDA (`cuda`)                              CPU (`cpu`)
   Stream       a CUDA stream                              a thread that runs what it is given, in order
   current      torch's current stream of this thread      the calling thread: what it was given is done
   Event        a CUDA event                               reached when the stream's thread gets to it
   the clock    the device's                               the host's
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


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

    def run(self, work: Callable[[], object]) -> None:
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
