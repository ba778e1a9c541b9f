"""Calls in a second process. Only commands start one: it would run a script again that is not guarded by its `__name__`."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

Later = Callable[..., Callable[[], Any]]
"""(function, its arguments) -> a call for its result."""


@contextmanager
def beside(*, worth: bool) -> Iterator[Later]:
    """Run calls in another process, one after the other. A call that has not started there when its result is needed runs in this
    process, and so does every call if that process dies. `worth`: whether calls take longer than the start of a process; if not,
    all run in this one."""
    if not worth or os.cpu_count() == 1:
        yield partial
        return
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor  # `--help` does without
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    process = ProcessPoolExecutor(1, get_context("spawn"), initializer=gc.set_threshold, initargs=gc.get_threshold())
    with process, ThreadPoolExecutor(1) as turns:

        def later(call: Callable[..., Any], *given: Any, **named: Any) -> Callable[[], Any]:
            turn = turns.submit(lambda: process.submit(call, *given, **named).result())

            def result() -> Any:
                if not turn.cancel():
                    with suppress(BrokenProcessPool):
                        return turn.result()
                return call(*given, **named)

            return result

        yield later


def results(calls: list[Callable[[], Any]]) -> list[Any]:
    """Return what calls return, in their order. The last ones may not have started."""
    return [call() for call in reversed(calls)][::-1]
