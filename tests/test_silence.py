"""What HiGHS prints is not in front of an answer that programs read."""

from __future__ import annotations

import ctypes
import os

import pytest

from megatron_lynx.silence import nothing_printed

LIBC = ctypes.CDLL(None)


def test_what_c_prints_inside_goes_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    """C keeps what it prints in a buffer when standard output is no terminal: it would come out later."""
    LIBC.puts(b"before")
    with nothing_printed():
        LIBC.puts(b"inside")
    LIBC.puts(b"behind")
    LIBC.fflush(None)
    assert capfd.readouterr().out.split() == ["before", "behind"]


def test_standard_output_is_back_behind_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), nothing_printed():
        raise ZeroDivisionError
    print("behind", flush=True)
    assert capfd.readouterr().out == "behind\n"


def test_a_closed_standard_output_stays_closed(capfd: pytest.CaptureFixture[str]) -> None:
    kept = os.dup(1)
    os.close(1)
    try:
        with nothing_printed():
            pass
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(1)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
