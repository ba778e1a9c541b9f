"""Emulates two hosts on one machine, connected by a link of a given rate. Rank r is on host r mod 2.

    rank 0, host 0    all_reduce posted ─────────────> gloo done ── sleeps ──────────> `Work.wait` returns
    rank 1, host 1             all_reduce posted ────> gloo done ── sleeps ──────────> `Work.wait` returns
    link              earlier bytes ──────────┤ bytes / rate ┤ latency ┤

A collective between hosts starts when its last member has posted it, queues after earlier collectives in the same direction, and
takes bytes / rate. All ranks share one memory file: the time until which each direction is busy, and the transfers in flight.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import mmap
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial, wraps
from itertools import takewhile
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from megatron_lynx.nest import all_in
from megatron_lynx.testbed.stand_in import ignore, replace

LATENCY_S = 50e-6
"""From the departure of the last byte to its arrival, about that of a few switches. The link is free meanwhile."""

MOST_TRANSFERS = 1024

TRANSFER = np.dtype([("key", "u8"), ("members", "i8"), ("bytes", "f8", 2), ("arrival_s", "f8")])
"""A collective posted by some members: their count, bytes sent from each host, and arrival time (inf: not started)."""
SHARED = np.dtype([("busy_until_s", "f8", 2), ("transfers", TRANSFER, MOST_TRANSFERS)])
"""One value per direction, by sending host. Seconds of `time.monotonic`, which is common to all processes."""


class Links(AbstractContextManager["Links"]):
    """The network of a pool of ranks: loopback, or two hosts with a link of `rate_mbit` Mbit/s each way."""

    def __init__(self, rate_mbit: float | None = None) -> None:
        if rate_mbit is not None and not rate_mbit > 0:
            raise ValueError(f"rate_mbit must be positive, found {rate_mbit}")
        self.rate_mbit = rate_mbit
        self._memory: int | None = None
        if rate_mbit is not None:
            self._memory = os.memfd_create("lynx-link")
            os.ftruncate(self._memory, SHARED.itemsize)

    @property
    def description(self) -> str:
        if self.rate_mbit is None:
            return "ranks talk over this machine's loopback, unshaped"
        return f"two emulated hosts, joined by a link of {self.rate_mbit:g} Mbit/s each way"

    def environment(self, rank: int) -> dict[str, str]:
        link = {} if self._memory is None else {"LYNX_LINK": f"{self.rate_mbit} /proc/{os.getpid()}/fd/{self._memory}"}
        return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", **link}

    def close(self) -> None:
        if self._memory is not None:
            os.close(self._memory)
            self._memory = None

    def __exit__(self, *error: object) -> None:
        self.close()


class Link:
    """The link in one rank's process. `setting`: the value of `LYNX_LINK`."""

    def __init__(self, setting: str, rank: int) -> None:
        rate_mbit, path = setting.split(maxsplit=1)
        self._bytes_per_s = float(rate_mbit) * 1e6 / 8
        self._rank = rank
        self._file = os.open(path, os.O_RDWR)
        self._shared = np.ndarray((), SHARED, mmap.mmap(self._file, SHARED.itemsize))
        self._threads = threading.Lock()  # `lockf` excludes processes, not threads
        self._posted: Counter[str] = Counter()
        """Transfers by channel: run, group, ends of a message. All members post a channel's transfers in the same order."""

    def post(self, operation: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> Callable[[], None]:
        """Register an operation right before this rank posts it; return a function that sleeps until the transfer is complete."""
        ranks = dist.get_process_group_ranks(group)
        ends = _ends(operation, ranks, self._rank, args)
        members = list(ends[:2]) or ranks
        if len({_host(rank) for rank in members}) == 1:
            return ignore
        run = os.environ.get("MASTER_PORT"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
        channel = f"{run} {group.group_name} {ends}"
        self._posted[channel] += 1
        digest = hashlib.blake2b(f"{channel} {self._posted[channel]}".encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        self._add(key, len(members), bytes_sent(operation, args, members, self._rank))
        return partial(self._wait, key)

    def _wait(self, key: int) -> None:
        with self._locked():
            arrival_s = max(self._transfers["arrival_s"][self._transfers["key"] == key], default=0.0)
        left_s = arrival_s - time.monotonic()
        if 0 < left_s < math.inf:  # inf: a rooted operation has not started, and this rank's part is complete
            time.sleep(left_s)

    @property
    def _transfers(self) -> Any:
        return self._shared["transfers"]

    def _add(self, key: int, members: int, sent_bytes: float) -> None:
        with self._locked():
            now_s = time.monotonic()
            live = self._transfers["arrival_s"] >= now_s
            places = np.flatnonzero(live & (self._transfers["key"] == key))
            if not len(places):
                places = np.flatnonzero(~live)[:1]
                if not len(places):
                    raise RuntimeError(f"{MOST_TRANSFERS} transfers are in flight between the emulated hosts, needed fewer")
                self._transfers[places[0]] = (key, 0, (0.0, 0.0), math.inf)
            transfer = self._transfers[places[0]]
            transfer["members"] += 1
            transfer["bytes"][_host(self._rank)] += sent_bytes
            if transfer["members"] == members:
                transfer["arrival_s"] = self._crossed(now_s, transfer["bytes"]) + LATENCY_S

    def _crossed(self, now_s: float, sent_bytes: Any) -> float:
        busy = self._shared["busy_until_s"]
        used = sent_bytes > 0
        busy[used] = np.maximum(busy[used], now_s) + sent_bytes[used] / self._bytes_per_s
        return float(max(busy[used], default=now_s))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)


def bytes_sent(operation: str, args: tuple[Any, ...], ranks: list[int], rank: int) -> float:
    """Return the bytes that one rank sends to the other host.

    Reductions and gathers run on a ring of n ranks: each sends (n - 1)/n of the gathered tensor, twice that in an all-reduce. An
    all-to-all sends 1/n of its input to each rank. Rooted operations send the tensor once from rank to rank.
    """
    name, total = operation.replace("_", ""), len(ranks)
    if name in ("recv", "barrier"):
        return 0.0
    if name.startswith("alltoall"):
        return _bytes(args[1]) * sum(_host(other) != _host(rank) for other in ranks) / total
    if _host(ranks[(ranks.index(rank) + 1) % total]) == _host(rank):
        return 0.0
    if name.startswith("allreduce"):
        return _bytes(args[0]) * 2 * (total - 1) / total
    if name.startswith("allgather"):
        return float(_bytes(args[1]) * (total - 1))
    if name.startswith("reducescatter"):
        return float(_bytes(args[0]) * (total - 1))
    return float(_bytes(args[1 if name == "gather" else 0]))


def _ends(operation: str, ranks: list[int], rank: int, args: tuple[Any, ...]) -> tuple[int, ...]:
    if operation not in ("send", "recv"):
        return ()
    peer, tag = ranks[args[1]], args[2] if len(args) > 2 else 0
    return (rank, peer, tag) if operation == "send" else (peer, rank, tag)


def _host(rank: int) -> int:
    return rank % 2


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in all_in(torch.Tensor, tensors))


MESSAGES = ("send", "recv")
COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"),
)
"""Methods of `ProcessGroup` that return a `Work`; some exist only in some torch releases."""


class Posted:
    """A work that this rank posted. `crosses`: waits until its bytes have crossed the emulated link."""

    def __init__(self, operation: str, group: ProcessGroup, peer: int | None, crosses: Callable[[], None]) -> None:
        self.over = False
        self.operation, self.group, self.peer = operation, group, peer
        self.pair = None if peer is None else (operation, group, peer)
        """Direction and ends of a message. Messages of one pair arrive in posting order."""
        self._crosses = crosses
        self._waiting = threading.Lock()

    def wait(self, work: Work, original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Wait as `Work.wait` does, once; concurrent callers wait for the first."""
        with self._waiting:
            if not self.over:
                original(work, *args, **kwargs)
                self._crosses()
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
                replace(undo, ProcessGroup, name, self._posting(name, getattr(ProcessGroup, name)))
        self._wait = Work.wait
        replace(undo, Work, "wait", self._waiting(Work.wait))

    @cached_property
    def _link(self) -> Link | None:
        setting = os.environ.get("LYNX_LINK")
        return None if setting is None else Link(setting, int(os.environ["RANK"]))

    def posting(self, operation: str, group: ProcessGroup, args: tuple[Any, ...]) -> Posted:
        """Hook right before an operation is posted. `args`: the method's arguments without the group."""
        crosses = ignore if self._link is None else self._link.post(operation, group, args)
        return Posted(operation, group, args[1] if operation in MESSAGES else None, crosses)

    def posted(self, work: Work, posted: Posted, args: tuple[Any, ...]) -> None:
        """Hook right after an operation is posted."""

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
            return posted.wait(work, self._wait, *args, **kwargs)
        finally:
            self._forget(posted)

    def _forget(self, posted: Posted) -> None:
        """Drop a work and earlier messages of its pair: Megatron's interleaved schedule waits only for the last."""
        if posted in self._pending and posted.pair is not None:
            for older in list(takewhile(lambda one: one is not posted, self._pending)):
                if older.pair == posted.pair:
                    del self._pending[older]
        self._pending.pop(posted, None)
