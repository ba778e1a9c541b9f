"""Standard output stays ours while a solver runs: HiGHS prints from C++ now and then, whatever its options say.

    print("{") ── [ HiGHS: printf(...) ] ── print("}")     what is in brackets goes nowhere

A line of it in front of an answer makes `--json` something that is not JSON.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STANDARD_OUTPUT = 1


@contextmanager
def nothing_printed() -> Iterator[None]:
    """What C code writes to standard output inside goes nowhere. Nothing changes where standard output is closed."""
    try:
        kept = os.dup(STANDARD_OUTPUT)
    except OSError:
        yield
        return
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    _flush_c()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STANDARD_OUTPUT)
    os.close(nowhere)
    try:
        yield
    finally:
        _flush_c()
        os.dup2(kept, STANDARD_OUTPUT)
        os.close(kept)


def _flush_c() -> None:
    """What C has written and keeps in its buffers goes where standard output points now."""
    ctypes.CDLL(None).fflush(None)
