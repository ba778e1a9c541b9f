"""Calls in other processes. Only commands start them: they would run a script again that is not guarded by its `__name__`."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

Watch = Callable[[int, int], None]
"""Called with (done, total)."""

PROCESSES = 4
"""The most, with this one: `advise` has four calls that do not depend on each other."""

Later = Callable[..., Callable[[], Any]]
"""(function, its arguments) -> a call for its result."""


@contextmanager
def beside(*, worth: bool) -> Iterator[Later]:
    """Run calls in other processes, on as many cores as there are. A call that has not started there when its result is needed
    runs in this process, and so do all calls of a process that dies. `worth`: whether calls take longer than the start of a
    process; if not, all run in this one."""
    others = min(os.cpu_count() or 1, PROCESSES) - 1
    if not worth or not others:
        yield partial
        return
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor  # `--help` does without
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    processes = ProcessPoolExecutor(others, get_context("spawn"), initializer=_begun, initargs=gc.get_threshold())
    with processes, ThreadPoolExecutor(others) as turns:

        def later(call: Callable[..., Any], *given: Any, **named: Any) -> Callable[[], Any]:
            turn = turns.submit(lambda: processes.submit(call, *given, **named).result())

            def result() -> Any:
                if not turn.cancel():
                    with suppress(BrokenProcessPool):
                        return turn.result()
                return call(*given, **named)

            return result

        yield later


def _begun(*threshold: int) -> None:
    """Let this new process collect garbage as its parent does, end with it, even if that is killed, and say nothing at Ctrl-C."""
    from multiprocessing import parent_process
    from threading import Thread

    def end_with_parent() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    gc.set_threshold(*threshold)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=end_with_parent, daemon=True).start()


def results(calls: list[Callable[[], Any]], watch: Watch | None = None) -> list[Any]:
    """Return what calls return, in their order. The last ones may not have started. `watch` is called before each."""
    found = list[Any]()
    for call in reversed(calls):
        if watch is not None:
            watch(len(found), len(calls))
        found.append(call())
    return found[::-1]
