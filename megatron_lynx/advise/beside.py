"""Runs a function in a second process at the same time.

A fresh interpreter reads the pickled call: it has neither the threads nor the `__main__` of the caller's script.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")

CALLED = """
import pickle, sys
sys.path[:] = {path!r}
function, arguments = pickle.load(sys.stdin.buffer)
pickle.dump(function(*arguments), sys.stdout.buffer)
"""


@contextmanager
def beside(function: Callable[..., Result], *arguments: object) -> Iterator[Callable[[], Result]]:
    """Start the call; yield a function that waits for its result, which is killed at the end of the block.

    The function is called in this process if there is one core or the other process fails.
    """
    process = _started(pickle.dumps((function, arguments))) if _cores() > 1 and sys.executable else None

    def result() -> Result:
        if process is not None and process.stdout is not None:
            answer = process.stdout.read()
            if process.wait() == 0:
                outcome: Result = pickle.loads(answer)
                return outcome
        return function(*arguments)

    try:
        yield result
    finally:
        if process is not None:
            process.kill()
            process.communicate()


def _started(call: bytes) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", CALLED.format(path=sys.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(call)
    process.stdin.flush()
    return process


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
