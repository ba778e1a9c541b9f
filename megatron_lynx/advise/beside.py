"""Runs functions in a second process at the same time.

A fresh interpreter reads the pickled calls: it has neither the threads nor the `__main__` of the caller's script.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

Call = Callable[[], Any]
"""A partial of a function that the second process can import."""

CALLED = """
import gc, pickle, sys
gc.disable()
sys.path[:] = {path!r}
for call in pickle.load(sys.stdin.buffer):
    pickle.dump(call(), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


@contextmanager
def beside(*calls: Call) -> Iterator[Call]:
    """Start the calls, one after the other; yield a function that waits for the next one's result. The process is killed at the
    end of the block.

    A call is made in this process if there is one core or the other process fails.
    """
    process = _started(pickle.dumps(calls)) if _cores() > 1 and sys.executable else None
    left = iter(calls)

    def result() -> Any:
        call = next(left)
        if process is not None and process.stdout is not None:
            with suppress(EOFError, pickle.UnpicklingError):
                return pickle.load(process.stdout)
        return call()

    try:
        yield result
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def _started(calls: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CALLED.format(path=sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None, "it is a pipe"
    with suppress(BrokenPipeError):  # it has failed
        process.stdin.write(calls)
        process.stdin.flush()
    return process


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
