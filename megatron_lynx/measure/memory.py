"""Activation bytes of a step, counted the same way for every setting.

Count in a step after a warm-up, because lazily allocated buffers would count as activations.

CUDA     the caching allocator's own statistics: blocks, rounded to 512 bytes
a CPU    reports of PyTorch's allocator to its profiler, exact and at every allocation

On a CPU c10's flag "report CPU memory usage" is set before the first count, and stays set; it costs each allocation about a
microsecond. Without it the allocator knows only blocks of profiled threads, and takes a later block at the same address for the
old one. The count excludes workspaces that bypass the allocator (oneDNN, MKL), NumPy arrays, the release of blocks older than the
flag (`remember_blocks`), and peaks inside threads that neither the metered thread nor autograd started.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

import torch
from torch.autograd.profiler import profile, record_function

from megatron_lynx.errors import LynxError, Problem

P = ParamSpec("P")
R = TypeVar("R")


class Mark(NamedTuple):
    """Live bytes at one moment, and the peak from it to the next mark, above the level at entry."""

    name: str
    bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class MemoryUse:
    peak_bytes: int
    marks: tuple[Mark, ...]
    left_bytes: int
    """Still live when the meter was closed."""
    level_bytes: int
    """The allocator's total at entry. On a CPU without blocks older than the flag."""

    @property
    def resident_bytes(self) -> int:
        return max((mark.bytes for mark in self.marks), default=0)

    def at(self, name: str) -> int:
        return next(mark.bytes for mark in self.marks if mark.name == name)


class ActivationMeter:
    """Counts allocations inside a `with` block; `use` exists after a block without an exception."""

    use: MemoryUse

    def __enter__(self) -> Self:
        raise NotImplementedError

    def mark(self, name: str) -> None:
        """Remember the live bytes. Costs one tiny allocation at most, which is not counted."""
        raise NotImplementedError

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None: ...

    def _set_use(self, names: Sequence[str], totals: Sequence[int], peaks: Sequence[int]) -> None:
        """`totals`: live bytes at entry, at the marks and at exit. `peaks`: from each of these but the last to the next one."""
        level, *inner, left = totals
        marks = zip(names, inner, peaks[1:], strict=True)
        self.use = MemoryUse(
            max(peaks) - level, tuple(Mark(name, at - level, peak - level) for name, at, peak in marks), left - level, level
        )


def activation_meter(device: torch.device | str) -> ActivationMeter:
    device = torch.device(device)
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def count_step(
    step: Callable[[ActivationMeter], object], device: torch.device | str, parameters: Iterable[torch.nn.Parameter] = ()
) -> MemoryUse:
    """Bytes of `step(meter)`: forward and backward passes, without clearing gradients or an optimizer's step.

    Gradients of `parameters` are zeros before, so that they do not count. Pass none if they live in buffers (Megatron's DDP).
    """
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    with activation_meter(device) as meter:
        step(meter)
    return meter.use


def marked(function: Callable[P, R], meter: ActivationMeter, name: str) -> Callable[P, R]:
    """`function` with a mark after each call, for Megatron's `forward_step_func`."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        meter.mark(name)
        return result

    return call


class CudaMeter(ActivationMeter):
    """Reads the caching allocator's statistics without synchronising. Resets the device's peak."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        self._names: list[str] = []
        self._peaks: list[int] = []
        torch.cuda.reset_peak_memory_stats(self._device)
        self._totals = [torch.cuda.memory_allocated(self._device)]
        return self

    def mark(self, name: str) -> None:
        self._names.append(name)
        self._read()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self._read()
            self._set_use(self._names, self._totals, self._peaks)

    def _read(self) -> None:
        self._peaks.append(torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)
        self._totals.append(torch.cuda.memory_allocated(self._device))


@contextmanager
def nothing_reported() -> Iterator[None]:
    """Suppress standard error in the block, C libraries' included: Kineto reports there, and has no switch."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


TASKS = Path("/proc/self/task")
_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
_MARK = "megatron_lynx.mark:"


def remember_blocks() -> None:
    """Make the allocator remember every block's size, for the life of the process.

    Call it before the model is built if a counted step may free older blocks. Raises LynxError if this PyTorch lacks the flag.
    """
    file = Path(torch.__file__).parent / "lib" / ("libc10.dylib" if sys.platform == "darwin" else "libc10.so")
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(file)), _FLAG)
    except (OSError, ValueError) as error:
        needed, todo = f"a C10 library with {_FLAG}", "use a release wheel of PyTorch"
        problem = Problem(f"torch {torch.__version__}", str(error), needed, todo)
        raise LynxError("Bytes cannot be counted on the CPU", [problem]) from error
    # The allocator warns about the first block whose size it does not know: let that be this one.
    with nothing_reported():
        unknown = torch.empty(1, device="cpu")
        flag.value = True
        del unknown


def wait_for_other_threads() -> None:
    """Wait, at most half a second, until every other thread sleeps: gloo's free a result only after its waiter resumes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    until_s = time.monotonic() + 0.5
    while True:
        time.sleep(0.001)  # releases the interpreter's lock, which a thread needs to free a tensor
        others = (task for task in TASKS.glob("*") if int(task.name) != threading.get_native_id())
        if time.monotonic() > until_s or all(_state(task) == "S" for task in others):
            return


def _state(task: Path) -> str:
    """State letter of a thread; S if it has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "S"


class CpuMeter(ActivationMeter):
    """Counts on the CPU. It can be used neither inside itself nor inside another profiler: PyTorch runs one at a time.

    Every report of the allocator carries the total of all threads. A mark is one tiny tensor, so that the total is reported then.
    """

    def __enter__(self) -> Self:
        remember_blocks()
        self._names: list[str] = []
        self._profiler = profile(profile_memory=True)
        with nothing_reported():
            self._profiler.__enter__()
        self.mark("enter")
        return self

    def mark(self, name: str) -> None:
        wait_for_other_threads()
        with record_function(f"{_MARK}{len(self._names)}"):
            torch.empty(1, device="cpu")
        self._names.append(name)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self.mark("exit")
        with nothing_reported():
            self._profiler.__exit__(kind, error, traceback)
        if error is None:
            self._read(self._profiler.kineto_results)

    def _read(self, results: Any) -> None:
        totals = [0] * len(self._names)
        peaks_bytes = [0] * len(self._names)  # from each mark to the next
        now = 0
        for _, mark, report in sorted(_reports(results.experimental_event_tree()), key=lambda marked_report: marked_report[0]):
            total = report.total_allocated
            if mark is not None and report.alloc_size > 0:
                now, total = mark, total - report.alloc_size
                totals[mark] = total
            if mark is None or mark == now:
                peaks_bytes[now] = max(peaks_bytes[now], total)
        self._set_use(self._names[1:-1], totals, peaks_bytes[:-1])


def _reports(tree: Any) -> Iterator[tuple[int, int | None, Any]]:
    """The CPU allocator's reports: time, number of the mark that made it (None: the step itself), contents."""
    pending: list[tuple[int | None, Any]] = [(None, event) for event in tree]
    while pending:
        mark, event = pending.pop()
        if event.name.startswith(_MARK):
            mark = int(event.name.removeprefix(_MARK))
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, mark, event.extra_fields
        pending += [(mark, child) for child in event.children]
