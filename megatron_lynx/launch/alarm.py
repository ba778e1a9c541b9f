"""A rank that fails while others wait for it in a collective ends all of them, with one message.

    rank 1   out of memory ─ says why ─ raises the alarm ─ until all have seen it ─ exit 1
    rank 0   in a collective, waiting for rank 1 ·······································
             its watcher looks every second ────────────── sees it ─ until all have ── exit 1, silent

No rank leaves before all have seen the alarm: the store may live in any of them, and goes with it.

Ranks that wait in a collective cannot be asked (`agreement`), and NCCL would let them wait for ten minutes. The alarm is a key in
the store that the process group was made with. A thread of each rank polls it, only while `ending_together` is in force.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_lynx.errors import LynxError
from megatron_lynx.launch.agreement import agree
from megatron_lynx.launch.message import say

LOOK_EVERY_S = 1.0
PATIENCE_S = 10.0
"""How long a rank waits for the others to see the alarm, or for the one that prints the message."""

FIRST, RAISED, SEEN = (f"megatron-lynx/alarm/{what}" for what in ("first", "raised", "seen by rank "))


@contextmanager
def ending_together() -> Iterator[None]:
    """A `LynxError` inside, on any rank, ends all ranks that are inside: the first of them says why, once.

    Without other ranks the error ends this one as any other does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        try:
            yield
        except LynxError as error:
            agree(error)
        return
    store = _store()
    try:
        with _watching(store):  # no longer when this one raises the alarm: its own watcher would see it
            yield
    except LynxError as error:
        _raise_alarm(store, error)
    except Exception:
        if _is_raised(store):  # it fails because a rank is gone
            _follow(store)
        raise


class LastWord:
    """Who ended the job: the first rank that failed on its own account, which says why. All others leave without a word.

    To be made while all ranks live: it holds a connection of its own to the store.
    """

    def __init__(self) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._store: Any = _store() if several else None

    def is_first(self) -> bool:
        """Whether this rank, which fails and will leave, is the first that does. The one that hosts the store was, if it is gone:
        it waits for nobody."""
        if self._store is None:
            return True
        first = not _another_was_first(self._store, gone=True)
        _set(self._store, RAISED)
        _set(self._store, f"{SEEN}{dist.get_rank()}")
        return first

    def follow(self) -> None:
        """Leave, if this rank fails because another one is gone that has said why."""
        if self._store is not None and _is_raised(self._store):
            _follow(self._store)


def _store() -> Any:
    """A connection of our own, where torch can make one: on a shared one we would wait for what another thread waits for."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


@contextmanager
def _watching(store: Any) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        answered = False
        while not over.wait(LOOK_EVERY_S):
            try:
                raised = store.check([RAISED])
            except RuntimeError:
                if answered and not over.wait(LOOK_EVERY_S):  # not at the end of the job, when the store's host may end first
                    say(f"megatron-lynx: rank {dist.get_rank()}: the rank that hosts the store is gone, so this one ends")
                    _leave()
                return
            answered = True
            if raised:
                _follow(store)

    watcher = threading.Thread(target=watch, name="megatron-lynx alarm", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _is_raised(store: Any) -> bool:
    with suppress(RuntimeError):  # a store that is gone
        return bool(store.check([RAISED]))
    return False


def _raise_alarm(store: Any, error: LynxError) -> NoReturn:
    if _another_was_first(store):
        _wait_for(store, [RAISED])
        _follow(store, error.exit_status)
    say(f"megatron-lynx: rank {dist.get_rank()}: {error}")
    _set(store, RAISED)
    _until_all_have_seen(store)
    _leave(error.exit_status)


def _another_was_first(store: Any, *, gone: bool = False) -> bool:
    """`gone`: the answer where nobody hosts the store any more."""
    with suppress(RuntimeError):
        return bool(store.add(FIRST, 1) > 1)
    return gone


def _follow(store: Any, status: int = 1) -> NoReturn:
    """Leave after the rank that raised the alarm: torchrun reports the rank that ended first."""
    _until_all_have_seen(store)
    time.sleep(LOOK_EVERY_S)
    _leave(status)


def _until_all_have_seen(store: Any) -> None:
    _set(store, f"{SEEN}{dist.get_rank()}")
    _wait_for(store, [f"{SEEN}{rank}" for rank in range(dist.get_world_size())])


def _set(store: Any, key: str) -> None:
    with suppress(RuntimeError):
        store.set(key, "")


def _wait_for(store: Any, keys: list[str]) -> None:
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=PATIENCE_S))


def _leave(status: int = 1) -> NoReturn:
    """End this process without Python's own clean-up, which could wait for other ranks."""
    sys.stdout.flush()
    os._exit(status)
