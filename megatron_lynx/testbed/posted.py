"""What this rank asked torch.distributed for and nobody has waited for yet, so that `torch.cuda.synchronize` can wait for it.

On a GPU every collective and every message is a kernel on the device, and a synchronisation ends when the last of them has: a
receive whose sender comes later, behind the very same synchronisation say, is a hang. gloo's works have no device to wait for.

    ProcessGroup.send, .recv, .allreduce, ...    [1] the work is remembered as pending
    Work.wait                                    [2] it is over; waiting twice is allowed (gloo's messages allow it once only)
    torch.cuda.synchronize                       [3] every pending work, or their names

It is these classes' methods that are replaced, because everything comes through them: Megatron's own calls, coalesced ones, those
of `batch_isend_irecv`, and collectives that are waited for at once.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.testbed.links import Link
from megatron_lynx.testbed.stand_in import ignore, replace

MESSAGES = ("send", "recv")
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Methods of `ProcessGroup` that return a `Work`, as far as a release of torch has them."""

BETWEEN = ("/torch/", "/megatron_lynx/testbed/", "/tests/instruments/", "contextlib.py", "typing_extensions.py")
"""Parts of the names of files that say nothing about who asked for a work."""

LONGEST_S = 60.0
"""A synchronisation that takes longer is taken for a hang: ranks of a test are never so far apart."""


class Posted:
    """One work that this rank posted. `crosses`: waits until it has crossed the link between emulated hosts (`links.Link`)."""

    def __init__(
        self, operation: str, group: ProcessGroup, peer: int | None, size: str, crosses: Callable[[], None] = ignore
    ) -> None:
        self.over = False
        self._crosses = crosses
        self.operation, self.group, self.peer = operation, group, peer
        self.pair = None if peer is None else (operation, group, peer)
        """Of a message: its direction and its two ends. Such messages arrive in the order in which they were posted."""
        self._waiting = threading.Lock()
        self._size, self._asked_at = size, asked_at()

    def wait(self, work: Work, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Wait as `Work.wait` does, once; whoever comes meanwhile waits for the first one."""
        with self._waiting:
            if not self.over:
                original(work, *args, **kwargs)
                self._crosses()
                self.over = True
        return True

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


class PostedWorks:
    """The works of this process since `watch`."""

    def __init__(self) -> None:
        self._pending: dict[Posted, Work] = {}
        """Those that nobody has waited for, oldest first."""
        self._known: weakref.WeakKeyDictionary[Work, Posted] = weakref.WeakKeyDictionary()
        self._wait: Callable[..., bool] = Work.wait
        self.listeners: list[WorkListener] = []
        self.link: Link | None = None

    def watch(self, undo: ExitStack) -> None:
        """Remember what is posted from now on, until `undo` is closed."""
        for name in (*MESSAGES, *COLLECTIVES):
            if hasattr(ProcessGroup, name):
                replace(undo, ProcessGroup, name, self._posting(name, getattr(ProcessGroup, name)))
        replace(undo, Work, "wait", self._waiting(Work.wait))

    def wait_for_all(self, longest_s: float) -> list[Posted]:
        """Wait for what was posted so far. What is not over after `longest_s` is returned; the first one that failed raises."""
        pending, errors, deadline = list(self._pending.items()), list[Exception](), time.monotonic() + longest_s

        def wait(posted: Posted, work: Work) -> None:
            try:
                self._finish(posted, work)
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

    def _posting(self, operation: str, original: Callable[..., Work]) -> Callable[..., Work]:
        @functools.wraps(original)
        def post(group: ProcessGroup, *args: Any, **kwargs: Any) -> Work:
            if operation in MESSAGES:  # an alias keeps the storage, which Megatron frees behind `isend`, and not the graph
                args = ([tensor.detach() for tensor in args[0]], *args[1:])
            crosses = ignore if self.link is None else self.link.post(operation, group, args)
            work = original(group, *args, **kwargs)
            posted = Posted(operation, group, args[1] if operation in MESSAGES else None, _size(args), crosses)
            self._pending[posted], self._known[work] = work, posted  # [1]
            for listener in self.listeners:
                listener.posted(work, posted, args)
            return work

        return post

    def _waiting(self, original: Callable[..., bool]) -> Callable[..., bool]:
        self._wait = original

        @functools.wraps(original)
        def wait(work: Work, *args: Any, **kwargs: Any) -> bool:
            posted = self._known.get(work)
            for listener in self.listeners:
                listener.waits(work)
            return original(work, *args, **kwargs) if posted is None else self._finish(posted, work, *args, **kwargs)

        return wait

    def _finish(self, posted: Posted, work: Work, *args: Any, **kwargs: Any) -> bool:
        try:
            return posted.wait(work, self._wait, *args, **kwargs)
        finally:
            self._forget(posted)  # [2]

    def _forget(self, posted: Posted) -> None:
        """And messages of the same pair before it: Megatron's interleaved schedule waits for the last one only."""
        if posted in self._pending and posted.pair is not None:
            for older in list(takewhile(lambda one: one is not posted, self._pending)):
                if older.pair == posted.pair:
                    del self._pending[older]
        self._pending.pop(posted, None)


class Synchronize:
    """`torch.cuda.synchronize` of a rank on a CPU: returns when all that was asked of this process's device would be done.

    What a stream of the stand-in was given is done when the call returns; what is posted depends on other ranks.
    """

    def __init__(self, works: PostedWorks, longest_s: float = LONGEST_S) -> None:
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
    """The one that the stand-in for CUDA has put in place, or what took its place and wraps it."""
    synchronize = inspect.unwrap(torch.cuda.synchronize)
    assert isinstance(synchronize, Synchronize), "the stand-in for CUDA is not active here"
    return synchronize


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
