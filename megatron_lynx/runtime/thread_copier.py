"""Copies without CUDA: a copier is a thread that copies in the order in which it is asked."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor

from megatron_lynx.runtime.trace import Trace
from megatron_lynx.runtime.transfer import Copier, Copy, Direction, Owner

Move = Callable[[Tensor, Tensor], object]
"""Copies the second tensor's bytes into the first."""


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

    def _started(self, target: Tensor, source: Tensor, owner: Owner, after: Iterable[Copy | None]) -> Copy:
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._asked,), name=f"lynx-{self.direction}", daemon=True)
            self._thread.start()
        self._under_way = [copy for copy in self._under_way if not copy.done]
        copy = _ThreadCopy(self.direction, owner, target, source, after)
        self._under_way.append(copy)
        self._asked.put((copy, self.move, self._trace))  # [1] by now everything computed so far exists
        return copy

    def wait(self, copy: Copy) -> None:
        assert isinstance(copy, _ThreadCopy)
        if not copy.done:
            begin = time.perf_counter()
            with self._trace.span("copy_wait", micro_batch=copy.owner.micro_batch):
                copy.wait()
            self._waited_s += time.perf_counter() - begin
        self.check(copy)

    def drain(self) -> None:
        for copy in self._under_way:
            copy.wait()
        self._under_way.clear()

    def cancel(self) -> None:
        self._newest = None
        for copy in self._under_way:
            copy.cancelled = True
        self.drain()

    def take_waited_s(self, *, exact: bool = True) -> float:
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
