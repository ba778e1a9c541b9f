"""The process's real peak memory during a step (Linux), to hold the activation counter against.

    malloc_trim(0)             pages that earlier steps freed go back, or a step would reuse them without a trace
    clear_refs <- 5            the kernel's high-water mark (VmHWM) falls to what is resident now (VmRSS)
    step
    VmHWM - VmRSS at entry     what the step needed on top

Run it in a process of its own, started with `ENVIRONMENT`. Otherwise it measures glibc's heap instead: a freed aligned block is
not reused for one of the same size, and a step of 1 MiB tensors took twice what it ever had live (33 MiB counted, 66 MiB
resident; 34 MiB with the environment). Setting the same by `mallopt` later does not help, since the heap has holes by then.

The figure is coarse where the counter is exact: it holds page rounding, kernel workspaces and Python objects, and it misses what
was allocated but never touched. It is right to the nearest few MiB, which makes it a check of the counter and no more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lynx.measure.measurement import CounterCheck
from megatron_lynx.measure.memory import activation_meter
from megatron_lynx.units import KIB

_PROCESS = Path("/proc/self")

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(64 * KIB), "MALLOC_TRIM_THRESHOLD_": str(64 * KIB)}
"""What a process must be started with (glibc reads it at start), so that every tensor gets pages of its own."""


def why_unavailable() -> str | None:
    """Why the peak cannot be read on this machine, in words; None if it can."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
        _status("VmHWM")
    except (OSError, KeyError) as error:
        return f"the kernel's high-water mark cannot be reset: {error}"
    return None


class ProcessPeak:
    """Measures a `with` block; `bytes` exists behind it. Raises OSError where `why_unavailable` gives a reason."""

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


def check_counter(step: Callable[[], object]) -> CounterCheck:
    """Runs a CPU step twice: first with the counter, which also warms it up, then without a profiler and with `ProcessPeak`."""
    with activation_meter("cpu") as meter:
        step()
    with ProcessPeak() as peak:
        step()
    return CounterCheck(counted_bytes=meter.use.peak_bytes, process_bytes=peak.bytes)


def _status(key: str) -> int:
    """Bytes of one line of /proc/self/status."""
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)
