"""Emulates links of a given rate between the ranks of one machine, as if each were on a host of its own.

    rank 0    all_reduce posted ───────────> gloo done ── sleeps ────────────────> `Work.wait` returns
    rank 1           all_reduce posted ────> gloo done ── sleeps ────────────────> `Work.wait` returns
    link      earlier bytes ──────────────────┤ bytes / rate ┤ latency ┤

A transfer starts when gloo has done it, soon after its last member has posted it, queues after earlier ones of its rank in the
same direction, and takes bytes / rate.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial, wraps
from itertools import takewhile
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import ProcessGroup, Work

from megatron_lynx.nest import all_in

LATENCY_S = 50e-6
"""From the departure of the last byte to its arrival, about that of a few switches. The link is free meanwhile."""

MOST_TRANSFERS = 1024
"""Transfers of a rank in flight, each with a thread that waits for it."""


class Links:
    """The network of a pool of ranks: loopback, or a link of `rate_mbit` Mbit/s each way for every rank."""

    def __init__(self, rate_mbit: float | None = None) -> None:
        if rate_mbit is not None and not rate_mbit > 0:
            raise ValueError(f"rate_mbit must be positive, found {rate_mbit}")
        self.rate_mbit = rate_mbit

    @property
    def description(self) -> str:
        if self.rate_mbit is None:
            return "ranks talk over this machine's loopback, unshaped"
        return f"emulated hosts of one rank each, joined by links of {self.rate_mbit:g} Mbit/s each way"

    def environment(self, rank: int) -> dict[str, str]:
        link = {} if self.rate_mbit is None else {"LYNX_LINK": str(self.rate_mbit)}
        return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **link}


class Link:
    """One rank's link, in its process."""

    def __init__(self, rate_mbit: float) -> None:
        self._bytes_per_s = rate_mbit * 1e6 / 8
        self._busy_until_s = {"out": 0.0, "in": 0.0}
        """By direction, on the clock `time.monotonic`."""
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MOST_TRANSFERS)

    def carry(self, done: Callable[[], object], operation: str, args: tuple[Any, ...], ranks: int) -> Future[float]:
        """Return the arrival time of a transfer, which is known when `done`, which waits for gloo, has returned."""
        return self._threads.submit(self._cross, done, bytes_moved(operation, args, ranks))

    def _cross(self, done: Callable[[], object], moved: dict[str, float]) -> float:
        done()
        with self._lock:
            over_s = now_s = time.monotonic()
            for direction, size in moved.items():
                self._busy_until_s[direction] = max(self._busy_until_s[direction], now_s) + size / self._bytes_per_s
                over_s = max(over_s, self._busy_until_s[direction])
            return over_s + LATENCY_S


def bytes_moved(operation: str, args: tuple[Any, ...], ranks: int) -> dict[str, float]:
    """Return the bytes that cross one rank's link, by direction.

    Reductions and gathers run on a ring of n ranks: each sends (n - 1)/n of the gathered tensor, twice that in an all-reduce. An
    all-to-all sends 1/n of its input to each other rank. Rooted operations send the tensor once from rank to rank.
    """
    name = operation.replace("_", "")
    if name in ("send", "recv"):
        return {"out" if name == "send" else "in": _bytes(args[0])}
    if name == "barrier":
        return {}
    if name.startswith("alltoall"):
        size = _bytes(args[1]) * (ranks - 1) / ranks
    elif name.startswith("allreduce"):
        size = _bytes(args[0]) * 2 * (ranks - 1) / ranks
    elif name.startswith(("allgather", "reducescatter")):
        size = _bytes(args[1 if name.startswith("allgather") else 0]) * (ranks - 1)
    else:
        size = _bytes(args[1 if name == "gather" else 0])
    return {"out": size, "in": size}


def _bytes(tensors: Any) -> float:
    return float(sum(tensor.nbytes for tensor in all_in(torch.Tensor, tensors)))


MESSAGES = ("send", "recv")
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Methods of `ProcessGroup` that return a `Work`; some exist only in some torch releases."""


class Posted:
    """A work that this rank posted. `arrival`: when its bytes have crossed the rank's link, if it has one."""

    def __init__(self, operation: str, group: ProcessGroup, peer: int | None) -> None:
        self.over = False
        self.operation, self.group, self.peer = operation, group, peer
        self.pair = None if peer is None else (operation, group, peer)
        """Direction and ends of a message. Messages of one pair arrive in posting order."""
        self.arrival: Future[float] | None = None
        self._waiting = threading.Lock()

    def wait(self, done: Callable[[], object]) -> bool:
        """Wait as `Work.wait` does, which is `done`, once; concurrent callers wait for the first."""
        with self._waiting:
            if not self.over:
                if self.arrival is None:
                    done()
                else:
                    time.sleep(max(0.0, self.arrival.result() - time.monotonic()))
                self.over = True
        return True


class Works:
    """Gives gloo's works the semantics of NCCL's: several waits are allowed, and a message may be dropped without a wait.

    Replaces methods of `ProcessGroup` and `Work.wait`, which Megatron's own calls, coalesced ones and `batch_isend_irecv` all
    use. With `LYNX_LINK` in the environment, works cross that link.
    """

    def __init__(self) -> None:
        self._pending: dict[Posted, Work] = {}
        """Works without a wait so far, oldest first."""
        self._known: weakref.WeakKeyDictionary[Work, Posted] = weakref.WeakKeyDictionary()
        self._wait: Callable[..., bool] = Work.wait

    def watch(self, undo: ExitStack) -> None:
        for name in (*MESSAGES, *COLLECTIVES):
            if hasattr(ProcessGroup, name):
                undo.enter_context(patch.object(ProcessGroup, name, self._posting(name, getattr(ProcessGroup, name))))
        self._wait = Work.wait
        undo.enter_context(patch.object(Work, "wait", self._waiting(Work.wait)))

    @cached_property
    def _link(self) -> Link | None:
        rate_mbit = os.environ.get("LYNX_LINK")
        return None if rate_mbit is None else Link(float(rate_mbit))

    def posting(self, operation: str, group: ProcessGroup, args: tuple[Any, ...]) -> Posted:
        """Hook right before an operation is posted. `args`: the method's arguments without the group."""
        return Posted(operation, group, args[1] if operation in MESSAGES else None)

    def posted(self, work: Work, posted: Posted, args: tuple[Any, ...]) -> None:
        """Hook right after an operation is posted."""
        if self._link is not None and posted.group.size() > 1:
            posted.arrival = self._link.carry(partial(self._wait, work), posted.operation, args, posted.group.size())

    def waits(self, work: Work) -> None:
        """Hook before each `Work.wait`."""

    def _posting(self, operation: str, original: Callable[..., Work]) -> Callable[..., Work]:
        @wraps(original)
        def post(group: ProcessGroup, *args: Any, **kwargs: Any) -> Work:
            if operation in MESSAGES:  # an alias keeps the storage, which Megatron frees after `isend`, but not the graph
                args = ([tensor.detach() for tensor in args[0]], *args[1:])
            posted = self.posting(operation, group, args)
            work = original(group, *args, **kwargs)
            self._pending[posted], self._known[work] = work, posted
            self.posted(work, posted, args)
            return work

        return post

    def _waiting(self, original: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(original)
        def wait(work: Work, *args: Any, **kwargs: Any) -> bool:
            self.waits(work)
            posted = self._known.get(work)
            return original(work, *args, **kwargs) if posted is None else self.finish(posted, work, *args, **kwargs)

        return wait

    def finish(self, posted: Posted, work: Work, *args: Any, **kwargs: Any) -> bool:
        try:
            return posted.wait(partial(self._wait, work, *args, **kwargs))
        finally:
            self._forget(posted)

    def _forget(self, posted: Posted) -> None:
        """Drop a work and earlier messages of its pair: Megatron's interleaved schedule waits only for the last."""
        if posted in self._pending and posted.pair is not None:
            for older in list(takewhile(lambda one: one is not posted, self._pending)):
                if older.pair == posted.pair:
                    del self._pending[older]
        self._pending.pop(posted, None)
