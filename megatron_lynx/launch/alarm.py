"""One rank that cannot go on, in the middle of a collective, ends all of them.

    rank 1   out of memory ─ says why ─ rings ─────────── until all have heard ─ exit 1
    rank 0   in a collective, waiting for rank 1 ·······································
             its watcher looks every second ───────────── hears ─ until all have ──────── exit 1, silent

Nobody leaves before all have heard: the store may live in any of them, and goes with it.

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
    try:
        with _watching(store):  # not any more while this one rings: its watcher would hear that
            yield
    except LynxError as error:
        _ring(store, error)
    except Exception:
        if _rung(store):  # it fails because a rank is gone
            _follow(store)
        raise


def _store() -> Any:
    """A connection of our own, where torch can make one: what another thread waits for on the same one keeps us waiting."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone() if hasattr(store, "clone") else store


@contextmanager
def _watching(store: Any) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        answered = False
        while not over.wait(LOOK_EVERY_S):
            try:
                rung = store.check([RUNG])
            except RuntimeError:
                if answered and not over.wait(LOOK_EVERY_S):  # not at the end of all, where its host may be faster
                    say(f"megatron-lynx: rank {dist.get_rank()}: the rank that hosts the store is gone, so this one ends")
                    _leave()
                return
            answered = True
            if rung:
                _follow(store)

    watcher = threading.Thread(target=watch, name="megatron-lynx alarm", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _rung(store: Any) -> bool:
    with suppress(RuntimeError):  # a store that is gone
        return bool(store.check([RUNG]))
    return False


def _ring(store: Any, error: LynxError) -> NoReturn:
    if _another_speaks(store):
        _wait_for(store, [RUNG])
        _follow(store, error.exit_status)
    say(f"megatron-lynx: rank {dist.get_rank()}: {error}")
    _set(store, RUNG)
    _until_all_have_heard(store)
    _leave(error.exit_status)


def _another_speaks(store: Any) -> bool:
    with suppress(RuntimeError):
        return bool(store.add(FIRST, 1) > 1)
    return False


def _follow(store: Any, status: int = 1) -> NoReturn:
    """The one that rang goes first: torchrun reports who did."""
    _until_all_have_heard(store)
    time.sleep(LOOK_EVERY_S)
    _leave(status)


def _until_all_have_heard(store: Any) -> None:
    _set(store, f"{HEARD}{dist.get_rank()}")
    _wait_for(store, [f"{HEARD}{rank}" for rank in range(dist.get_world_size())])


def _set(store: Any, key: str) -> None:
    with suppress(RuntimeError):
        store.set(key, "")


def _wait_for(store: Any, keys: list[str]) -> None:
    with suppress(RuntimeError):
        store.wait(keys, timedelta(seconds=PATIENCE_S))


def _leave(status: int = 1) -> NoReturn:
    """Without what Python does at its end: that could wait for other ranks."""
    sys.stdout.flush()
    os._exit(status)
