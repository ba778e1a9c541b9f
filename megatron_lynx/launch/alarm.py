"""One rank that cannot go on, in the middle of a collective, ends all of them.

    rank 1   out of memory ─ says why ─ rings ─────────── until all have heard ─ exit 1
    rank 0   in a collective, waiting for rank 1 ·······································
             its watcher looks every second ───────────── hears ─────────────────────── exit 1, silent

Ranks that wait in a collective cannot be asked (`agreement`), and NCCL would let them wait for ten minutes. The bell is a key in
the store that the process group was made with; a thread of each rank looks there, and only while `ending_together` is in force.
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
"""How long a rank waits for the others to hear, or for the one that speaks."""

FIRST, RUNG, HEARD = (f"megatron-lynx/alarm/{what}" for what in ("first", "rung", "heard by rank "))


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
    with _watching(store):
        try:
            yield
        except LynxError as error:
            _ring(store, error)
        except Exception:
            if _hears(store):  # it fails because a rank is gone
                _leave()
            raise


def _store() -> Any:
    """A connection of our own, where torch can make one: what another thread waits for on the same one keeps us waiting."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


@contextmanager
def _watching(store: Any) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_EVERY_S):
            if _hears(store):
                time.sleep(LOOK_EVERY_S)  # the one that rang goes first: torchrun reports who did
                _leave()

    watcher = threading.Thread(target=watch, name="megatron-lynx alarm", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _hears(store: Any) -> bool:
    """A store that is gone rings no bell: whoever waits for its rank is ended by the group's timeout."""
    with suppress(RuntimeError):
        if store.check([RUNG]):
            store.set(f"{HEARD}{dist.get_rank()}", "")
            return True
    return False


def _ring(store: Any, error: LynxError) -> NoReturn:
    if store.add(FIRST, 1) > 1:  # another speaks
        _wait_for(store, [RUNG])
        _hears(store)
        _leave(error.exit_status)
    say(f"megatron-lynx: rank {dist.get_rank()}: {error}")
    store.set(RUNG, "")
    _wait_for(store, [f"{HEARD}{rank}" for rank in range(dist.get_world_size()) if rank != dist.get_rank()])
    _leave(error.exit_status)


def _wait_for(store: Any, keys: list[str]) -> None:
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=PATIENCE_S))


def _leave(status: int = 1) -> NoReturn:
    """Without what Python does at its end: that could wait for other ranks."""
    sys.stdout.flush()
    os._exit(status)
