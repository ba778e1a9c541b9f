"""Copies between a device and its host: one copier per direction, and the order between them (rule R9).

    compute  ── F k ──┬── B j ──────────────┬── F k+1 ──┬─ [3] ──   ── B k ──[4]──
    to host           └ [1] copies of k ──┐ │           │             ↑
    back                                  └───────────────[2] copies ─┘

 [1] a copy starts when what it reads exists: behind everything the compute stream was given so far
 [2] and behind the copies that it is told to follow: a reload behind its own way out, a way out behind its block's last reader
 [3] what was copied out is let go when the compute stream has waited for the copy, or when the copy is known to be done
 [4] a backward waits for the copies that it needs, on the compute stream

On CUDA a copier is a stream and a copy is an event on it; on a CPU a copier is a thread. Copies only follow copies that were
started before them, so nothing can wait in a ring.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.units import format_bytes

Direction = Literal["offload", "reload"]

MOST_WAITS = 256
"""Waits of one direction that are timed and not added up yet."""

Move = Callable[[Tensor, Tensor], object]
"""Copies the second tensor's bytes into the first."""


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


class Copier(ABC):
    """One direction."""

    def __init__(self, direction: Direction, trace: Trace) -> None:
        self.direction = direction
        self._trace = trace
        self._bytes = 0

    @abstractmethod
    def start(self, target: Tensor, source: Tensor, owner: Owner, after: Iterable[Copy | None] = ()) -> Copy:
        """Copy behind what the compute stream was given so far, and behind `after`. The caller need not hold the tensors."""

    @abstractmethod
    def wait(self, copy: Copy) -> None:
        """What is computed from now on comes behind this copy. Raises `OffloadError` where the copy is known to have failed."""

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
    def take_waited_s(self) -> float:
        """Seconds for which compute waited in `wait` since this was last asked (on CUDA: waits for the device)."""

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


def copiers_for(device: torch.device, trace: Trace) -> tuple[Copier, Copier]:
    """(to the host, back) for a device."""
    if device.type == "cuda":
        return StreamCopier("offload", trace, device), StreamCopier("reload", trace, device)
    return ThreadCopier("offload", trace), ThreadCopier("reload", trace)


# --- CUDA --------------------------------------------------------------------------------------------------------------------


@final
class _StreamCopy(Copy):
    def __init__(self, direction: Direction, owner: Owner, size_bytes: int) -> None:
        super().__init__(direction, owner, size_bytes)
        self.event = torch.cuda.Event()

    @property
    def done(self) -> bool:
        return bool(self.event.query())


@final
class StreamCopier(Copier):
    """A stream of its own. It holds no tensor: the device's memory is recorded with the caching allocator, and a slab of host
    memory goes only when the device is idle."""

    def __init__(self, direction: Direction, trace: Trace, device: torch.device) -> None:
        super().__init__(direction, trace)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._waits: list[tuple[Any, Any]] = []
        self._waited_s = 0.0

    def start(self, target: Tensor, source: Tensor, owner: Owner, after: Iterable[Copy | None] = ()) -> Copy:
        copy = _StreamCopy(self.direction, owner, target.nbytes)
        self._bytes += copy.bytes
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # [1]
        for before in after:
            if isinstance(before, _StreamCopy):
                self._stream.wait_event(before.event)  # [2]
        try:
            with torch.cuda.stream(self._stream), self._trace.span(self.direction, micro_batch=owner.micro_batch):
                target.copy_(source, non_blocking=True)
        except Exception as error:
            raise failed(self.direction, owner, copy.bytes, error) from error
        for tensor in (target, source):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        copy.event.record(self._stream)
        return copy

    def wait(self, copy: Copy) -> None:
        assert isinstance(copy, _StreamCopy)
        compute = torch.cuda.current_stream(self._device)
        if copy.done:
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(compute)
        compute.wait_event(copy.event)
        end.record(compute)
        self._waits.append((begin, end))
        if len(self._waits) >= MOST_WAITS:
            self._add_up()

    def drain(self) -> None:
        self._stream.synchronize()

    def cancel(self) -> None:
        self.drain()

    def take_waited_s(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        self._add_up()
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _add_up(self) -> None:
        """What the device has passed by now. Nobody may ever ask for the sum, so events must not pile up."""
        waits, self._waits = self._waits, []
        for begin, end in waits:
            if end.query():
                self._waited_s += float(begin.elapsed_time(end)) / 1e3
            else:
                self._waits.append((begin, end))

    def close(self) -> None:
        self.drain()


# --- CPU ---------------------------------------------------------------------------------------------------------------------


@final
class _ThreadCopy(Copy):
    def __init__(self, direction: Direction, owner: Owner, target: Tensor, source: Tensor, after: Iterable[Copy | None]) -> None:
        super().__init__(direction, owner, target.nbytes)
        self.cancelled = False
        self._tensors: tuple[Tensor, Tensor] | None = (target, source)
        self._after = [before for before in after if isinstance(before, _ThreadCopy)]
        self._over = threading.Event()

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        self._over.wait()

    def run(self, move: Move, trace: Trace) -> None:
        """In the copier's thread. Whatever goes wrong is kept for the one who waits."""
        try:
            self._copy(move, trace)
        except BaseException as error:  # noqa: BLE001 (handed to the training thread)
            self.error = error
        finally:
            self._tensors, self._after = None, []
            self._over.set()

    def _copy(self, move: Move, trace: Trace) -> None:
        for before in self._after:
            before.wait()  # [2]
            if before.error is not None:
                self.broken_by = before.broken_by or before
                raise before.error
        if self.cancelled:
            raise RuntimeError("the step had failed before")
        assert self._tensors is not None
        with torch.no_grad(), trace.span(self.direction, micro_batch=self.owner.micro_batch):
            move(*self._tensors)


@final
class ThreadCopier(Copier):
    """A thread that copies in the order in which it is asked. `move` is how: tests inject faults there."""

    def __init__(self, direction: Direction, trace: Trace, move: Move = Tensor.copy_) -> None:
        super().__init__(direction, trace)
        self.move = move
        self._asked: queue.SimpleQueue[tuple[_ThreadCopy, Move, Trace] | None] = queue.SimpleQueue()
        self._under_way: list[_ThreadCopy] = []
        self._thread: threading.Thread | None = None
        self._waited_s = 0.0
        weakref.finalize(self, self._asked.put, None)

    def start(self, target: Tensor, source: Tensor, owner: Owner, after: Iterable[Copy | None] = ()) -> Copy:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._asked,), name=f"lynx-{self.direction}", daemon=True)
            self._thread.start()
        self._under_way = [copy for copy in self._under_way if not copy.done]
        copy = _ThreadCopy(self.direction, owner, target, source, after)
        self._bytes += copy.bytes
        self._under_way.append(copy)
        self._asked.put((copy, self.move, self._trace))  # [1] by now everything computed so far exists
        return copy

    def wait(self, copy: Copy) -> None:
        assert isinstance(copy, _ThreadCopy)
        if not copy.done:
            begin = time.perf_counter()
            copy.wait()
            self._waited_s += time.perf_counter() - begin
        self.check(copy)

    def drain(self) -> None:
        for copy in self._under_way:
            copy.wait()
        self._under_way.clear()

    def cancel(self) -> None:
        for copy in self._under_way:
            copy.cancelled = True
        self.drain()

    def take_waited_s(self) -> float:
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def close(self) -> None:
        self.cancel()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._asked.put(None)
            thread.join()


def _serve(asked: queue.SimpleQueue[tuple[_ThreadCopy, Move, Trace] | None]) -> None:
    """A copier's thread. It refers to the queue only, so that a forgotten copier can go."""
    while (one := asked.get()) is not None:
        copy, move, trace = one
        del one
        copy.run(move, trace)
        del copy, move, trace
