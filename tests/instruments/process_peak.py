"""The process's real peak memory during a step (Linux), to compare with the activation counter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lynx.measure.memory import activation_meter
from megatron_lynx.units import KIB

_PROCESS = Path("/proc/self")

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 * KIB), "MALLOC_TRIM_THRESHOLD_": str(64 * KIB)}
"""Variables that glibc reads when a process starts; with these every tensor has pages of its own."""


def why_unavailable() -> str | None:
    """Why the peak cannot be read on this machine, in words; None if it can."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
        _status("VmHWM")
    except (OSError, KeyError) as error:
        return f"the kernel's high-water mark cannot be reset: {error}"
    return None


class ProcessPeak:
    """Bytes by which a `with` block raises the process's peak. Raises OSError where `why_unavailable` gives a reason.

        malloc_trim(0)             pages that earlier steps freed go back, or a step would reuse them without a trace
        clear_refs <- 5            the kernel's high-water mark (VmHWM) falls to what is resident now (VmRSS)
        step
        VmHWM - VmRSS at entry     what the step adds

    Run it in a process of its own, started with `ENVIRONMENT`. Otherwise it measures glibc's heap instead: a freed aligned block
    is not reused for one of the same size, and a step of 1 MiB tensors took twice what it ever had live (33 MiB counted, 66 MiB
    resident; 34 MiB with the environment). `mallopt` later does not help, since the heap has holes by then.

    Coarse where the counter is exact: page rounding, kernel workspaces and Python objects count, memory that was allocated and
    never touched does not. It is right to the nearest few MiB.
    """

    bytes: int

    def __enter__(self) -> ProcessPeak:
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):  # glibc
            libc.malloc_trim(0)
        (_PROCESS / "clear_refs").write_text("5")
        self._level = _status("VmRSS")
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.bytes = _status("VmHWM") - self._level


def counted_and_grown(step: Callable[[], object]) -> tuple[int, int]:
    """Peak bytes of a CPU step, first from the counter, which also warms the step up, then from the process."""
    with activation_meter("cpu") as meter:
        step()
    with ProcessPeak() as peak:
        step()
    return meter.use.peak_bytes, peak.bytes


def _status(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
