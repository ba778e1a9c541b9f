"""Suppresses the output of C libraries: HiGHS writes to standard output, Kineto to standard error, without a switch.

    print("{") ── [ HiGHS: printf(...) ] ── print("}")     suppressed in brackets

One such line would make the output of `--json` invalid.
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
    """Suppress what C code writes to this file descriptor in the block. Does nothing if it is closed."""
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
    """Write out C's buffers."""
    ctypes.CDLL(None).fflush(None)
