"""Copies between a device and its host: one copier per direction, and the order between them (rule R9).

    compute  ── F k ──┬── B j ──────────────┬── F k+1 ──┬─ [3] ──   ── B k ──[4]──
    to host           └ [1] copies of k ──┐ │           │             ↑
    back                                  └───────────────[2] copies ─┘

 [1] a copy starts when what it reads exists: behind everything the compute stream was given so far
 [2] and behind the copies that it is told to follow: a reload behind its own way out, a way out behind its block's last reader
 [3] what was copied out is let go when the compute stream has waited for the copy, or when the copy is known to be done
 [4] a backward waits for the copies that it needs, on the compute stream

 [5] where the plan keeps copies and messages apart: a message begins behind the copies asked for so far, and the next ones are
     asked for when the exchange is over

On CUDA a copier is a stream and a copy is an event on it (`stream_copier`); on a CPU a copier is a thread (`thread_copier`).
Copies only follow copies that were started before them, and never a message, so nothing can wait in a ring.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, NamedTuple

from torch import Tensor

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.units import format_bytes

Direction = Literal["offload", "reload"]


class Owner(NamedTuple):
    """Whose bytes a copy moves, for errors and traces."""

    where: str
    """`stage 0, chunk 1`."""
    micro_batch: int
    """Counted from 0 over the run."""


class Copy(ABC):
    """One copy that was asked for."""

    def __init__(self, direction: Direction, owner: Owner, size_bytes: int) -> None:
        self.direction = direction
        self.owner = owner
        self.bytes = size_bytes
        self.error: BaseException | None = None
        self.broken_by: Copy | None = None
        """The copy that failed, where it is one that this one came behind."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether it is over by now, well or not. Never decides what runs (rule R1), only when memory is given back."""

    def let_go(self) -> None:  # noqa: B027 (a thread's copy holds its tensors until it has run, and no longer)
        """Compute comes behind it, so it need not keep its tensors from being used again."""


class Copier(ABC):
    """One direction."""

    def __init__(self, direction: Direction, trace: Trace) -> None:
        self.direction = direction
        self._trace = trace
        self._bytes = 0
        self._newest: Copy | None = None

    def start(self, target: Tensor, source: Tensor, owner: Owner, after: Iterable[Copy | None] = ()) -> Copy:
        """Copy behind what the compute stream was given so far, and behind `after`. The caller need not hold the tensors."""
        self._newest = self._started(target, source, owner, after)
        self._bytes += self._newest.bytes
        return self._newest

    def give_way(self) -> None:
        """What is issued from now on, a message say, comes behind all copies asked for so far."""  # [5]
        if self._newest is not None:
            self.wait(self._newest)
            self._newest = None

    @abstractmethod
    def wait(self, copy: Copy) -> None:
        """What is computed from now on comes behind this copy. Raises `OffloadError` where the copy is known to have failed."""

    def settle(self) -> None:  # noqa: B027
        """Let go of the tensors of copies that are over."""

    @abstractmethod
    def drain(self) -> None:
        """Wait, on the host, until nothing is under way."""

    @abstractmethod
    def cancel(self) -> None:
        """Drop what has not begun, wait for what has."""

    def take_bytes(self) -> int:
        """Bytes of the copies that were started since this was last asked."""
        taken, self._bytes = self._bytes, 0
        return taken

    @abstractmethod
    def take_waited_s(self, *, exact: bool = True) -> float:
        """Seconds for which compute waited in `wait` since this was last asked. On CUDA that is known when the device has passed:
        `exact` waits for it, otherwise what is not over yet counts next time."""

    @abstractmethod
    def _started(self, target: Tensor, source: Tensor, owner: Owner, after: Iterable[Copy | None]) -> Copy: ...

    @abstractmethod
    def close(self) -> None:
        """Nothing is copied any more."""

    def check(self, copy: Copy) -> None:
        """Raises `OffloadError` for a copy that is known to have failed."""
        if copy.error is not None:
            # A new error each time: the traceback of one that is kept would keep the step's graph, and that graph the copy.
            broken = copy.broken_by or copy
            raise failed(broken.direction, broken.owner, broken.bytes, copy.error) from copy.error


def failed(direction: Direction, owner: Owner, size_bytes: int, error: BaseException) -> OffloadError:
    """The error of a step whose copy failed."""
    what = "copying activations to the host" if direction == "offload" else "copying activations back from the host"
    problem = Problem(
        f"{owner.where}, micro-batch {owner.micro_batch} of this run, {size_bytes} bytes",
        f"{type(error).__name__}: {error}",
        f"{format_bytes(size_bytes)} copied",
        "lower the stage's offload.bytes in the plan if memory was short",
    )
    return OffloadError(f"{what} failed", [problem])
