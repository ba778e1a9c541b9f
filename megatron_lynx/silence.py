"""What C code prints unasked goes nowhere: HiGHS's to standard output, Kineto's to standard error.

    print("{") ── [ HiGHS: printf(...) ] ── print("}")     what is in brackets

Neither has a switch for it. A line of it in front of an answer makes `--json` something that is not JSON.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

STANDARD_OUTPUT: Literal[1] = 1
STANDARD_ERROR: Literal[2] = 2


@contextmanager
def nothing_printed(to: Literal[1, 2] = STANDARD_OUTPUT) -> Iterator[None]:
    """What C code writes to this file descriptor inside goes nowhere. Nothing changes where it is closed."""
    try:
        kept = os.dup(to)
    except OSError:
        yield
        return
    with suppress(OSError, ValueError):
        (sys.stdout if to == STANDARD_OUTPUT else sys.stderr).flush()
    _flush_c()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, to)
    os.close(nowhere)
    try:
        yield
    finally:
        _flush_c()
        os.dup2(kept, to)
        os.close(kept)


def _flush_c() -> None:
    """What C has written and keeps in its buffers goes where it was meant to go so far."""
    ctypes.CDLL(None).fflush(None)
