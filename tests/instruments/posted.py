"""Remembers the works that this rank posted and has not waited for, so that `torch.cuda.synchronize` can wait for them.

On a GPU every collective and every message is a kernel on the device, and a synchronisation ends when the last of them has: a
receive whose sender comes later, after the same synchronisation for example, is a hang. gloo's works have no device to wait for.

    ProcessGroup.send, .recv, .allreduce, ...    [1] listeners are told, the place of the call is noted
    Work.wait                                    [2] listeners are told
    torch.cuda.synchronize                       [3] every pending work, or their names
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.testbed.cpu_device import OneGenerator
from megatron_lynx.testbed.links import MESSAGES, Posted, Works
from tests.instruments.replacing import replace

SYNCHRONIZE_S = "TESTBED_SYNCHRONIZE_S"
"""The environment variable with the seconds after which a synchronisation is taken for a hang; 0: it waits for nothing."""

BETWEEN = ("/torch/", "/megatron_lynx/testbed/", "/tests/instruments/", "contextlib.py", "typing_extensions.py")
"""Parts of the names of files that are no callers of interest."""

LONGEST_S = 60.0
"""A synchronisation that takes longer is taken for a hang: ranks of a test are never so far apart."""


def stand_in_for_posted(undo: ExitStack) -> None:
    """Replace the CPU's `torch.cuda.synchronize` by one that finds hangs. A second call does nothing, nor does one on a GPU."""
    if isinstance(torch.cuda.default_generators, OneGenerator) and not isinstance(_synchronize(), Synchronize):
        works = ListenedWorks()
        works.watch(undo)
        replace(undo, torch.cuda, "synchronize", Synchronize(works, float(os.environ.get(SYNCHRONIZE_S, LONGEST_S))))


class NotedWork(Posted):
    """A work with its size and the place where it was asked for."""

    def __init__(self, operation: str, group: ProcessGroup, args: tuple[Any, ...]) -> None:
        super().__init__(operation, group, args[1] if operation in MESSAGES else None)
        self._size, self._asked_at = _size(args), asked_at()

    def __str__(self) -> str:
        ranks = dist.get_process_group_ranks(self.group)
        direction = "to" if self.operation == "send" else "from"
        other = f"of ranks {ranks}" if self.peer is None else f"{direction} rank {ranks[self.peer]}"
        return f"{self.operation} {other} ({self._size}), asked for at {self._asked_at}"


class WorkListener:
    """Is told of works, and does nothing about them."""

    def posted(self, work: Work, posted: Posted, args: tuple[Any, ...]) -> None:
        """This rank posted a work. `args`: those of the method of `ProcessGroup`, without the group."""

    def waits(self, work: Work) -> None:
        """`Work.wait` is called: compute comes behind the work from here on (gloo computes some results in there)."""


class ListenedWorks(Works):
    """Works around those of the stand-in for CUDA, with listeners."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: list[WorkListener] = []

    def posting(self, operation: str, group: ProcessGroup, args: tuple[Any, ...]) -> Posted:
        return NotedWork(operation, group, args)

    def posted(self, work: Work, posted: Posted, args: tuple[Any, ...]) -> None:
        for listener in self.listeners:
            listener.posted(work, posted, args)

    def waits(self, work: Work) -> None:
        for listener in self.listeners:
            listener.waits(work)

    def wait_for_all(self, longest_s: float) -> list[Posted]:
        """Wait for what was posted so far. What is not over after `longest_s` is returned; the first one that failed raises."""
        pending, errors, deadline = list(self._pending.items()), list[Exception](), time.monotonic() + longest_s

        def wait(posted: Posted, work: Work) -> None:
            try:
                self.finish(posted, work)
            except Exception as error:  # noqa: BLE001 (raised below)
                errors.append(error)

        threads = [threading.Thread(target=wait, args=one, daemon=True) for one in pending]
        for thread in threads:  # and not gloo's own time limit, which closes all connections
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]
        return [posted for posted, _ in pending if not posted.over]


class Synchronize:
    """`torch.cuda.synchronize` of a rank on a CPU: returns when all that was asked of this process's device would be done.

    What a stream of the stand-in was given is done when the call returns; what is posted depends on other ranks.
    """

    def __init__(self, works: ListenedWorks, longest_s: float = LONGEST_S) -> None:
        self.works = works
        self._longest_s = longest_s

    def __call__(self, device: Any = None) -> None:
        if self._longest_s == 0:
            return
        hanging = self.works.wait_for_all(self._longest_s)  # [3]
        if hanging:
            needed = "the other side posted by then, without waiting for this rank first"
            where = f"rank {dist.get_rank()}"
            raise LynxError(
                f"torch.cuda.synchronize() has not returned within {self._longest_s:g} s: on a GPU this is a hang",
                [Problem(where, str(posted), needed, "post it behind the synchronisation") for posted in hanging],
            )

    @contextmanager
    def within(self, longest_s: float) -> Iterator[None]:
        """Another time limit inside. 0: nothing is waited for, as if there were no device."""
        before, self._longest_s = self._longest_s, longest_s
        try:
            yield
        finally:
            self._longest_s = before


def synchronizing_within(longest_s: float) -> Any:
    """A context in which this rank's `torch.cuda.synchronize` raises after so many seconds; 0: it waits for nothing."""
    return present_synchronize().within(longest_s)


@contextmanager
def listening_to_works(listener: WorkListener) -> Iterator[None]:
    """The listener is told inside of every work that this rank posts, and of every wait."""
    listeners = present_synchronize().works.listeners
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def present_synchronize() -> Synchronize:
    """The one in place, or what took its place and wraps it."""
    synchronize = _synchronize()
    assert isinstance(synchronize, Synchronize), "the stand-in for CUDA is not active here"
    return synchronize


def _synchronize() -> Any:
    return inspect.unwrap(torch.cuda.synchronize)


def _size(args: tuple[Any, ...]) -> str:
    """Of the first tensor among a method's arguments."""
    first = args[0] if args else None
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    return f"{str(first.dtype).removeprefix('torch.')} {list(first.shape)}" if isinstance(first, torch.Tensor) else "no tensor"


def asked_at() -> str:
    """Files and lines of the three innermost callers that are neither torch nor the testbed nor an instrument."""
    frame, found = sys._getframe(1), list[str]()
    while frame.f_back is not None and len(found) < 3:
        frame = frame.f_back
        if not lies_between(frame.f_code.co_filename):
            found.append(f"{frame.f_code.co_filename.rpartition('site-packages/')[2]}:{frame.f_lineno}")
    return " < ".join(found)


@functools.cache
def lies_between(file: str) -> bool:
    """Asked for every frame of every work that is posted."""
    return any(part in file for part in BETWEEN)
