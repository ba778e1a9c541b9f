"""Live bytes of PyTorch's CPU allocator, exact and at every allocation, without a probe in the code that is measured.

    first meter of the process:   c10's flag "report CPU memory usage" goes on, and stays on
                                  └ the allocator remembers every block's size and keeps one total for all threads
    enter   profiler on ── [enter]            a mark: one tiny tensor, so that the total is reported at this moment
       step     alloc +4096  total 12192      every report of the allocator carries that total ...
                free  -4096  total  8096      ... so nobody adds up events, and their order does not matter
       mark(name) ── [name]
    exit    ── [exit]   profiler off          peak = max(total) - total at [enter]

Why the flag: without it the allocator knows only blocks allocated by a profiled thread, keeps a wrong total when another
thread frees one, and takes a later block at the same address for the old one. Why it stays on: a table with gaps is worse
than none. It costs each later allocation about a microsecond, the same for every setting; time first, count afterwards.

Counted: what tensors ask for (`nbytes` of storages), by any thread. Not counted: kernel workspaces that bypass the allocator
(oneDNN, MKL), NumPy arrays, page rounding. Not seen: the release of blocks older than the flag (`remember_blocks`), and a
peak that begins and ends inside a thread that neither the metered thread nor autograd started.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch
from torch.autograd.profiler import profile, record_function

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.measure.memory import ActivationMeter, Mark, MemoryUse
from megatron_lynx.silence import STANDARD_ERROR, nothing_printed

LET_GO_S = 0.5
"""How long a mark waits at most for the other threads to rest."""
TASKS = Path("/proc/self/task")
"""The threads of this process, on Linux."""
_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"
_MARK = "megatron_lynx.mark:"
_ENTER, _EXIT = "<enter>", "<exit>"


def remember_blocks() -> None:
    """From now on the allocator knows every block's size, for the life of the process.

    Call it before the model is built where a counted step may free something older than itself. Raises LynxError if this
    build of PyTorch does not offer the flag.
    """
    try:
        flag = ctypes.c_bool.in_dll(ctypes.CDLL(str(c10_library())), _FLAG)
    except (OSError, ValueError) as error:
        needed, todo = f"a C10 library with {_FLAG}", "use a release wheel of PyTorch"
        problem = Problem(f"torch {torch.__version__}", str(error), needed, todo)
        raise LynxError("Activation bytes cannot be counted on the CPU", [problem]) from error
    # The allocator warns about the first block whose size it does not know: let that be this one.
    with nothing_printed(STANDARD_ERROR):
        unknown = torch.empty(1, device="cpu")
        flag.value = True
        del unknown


def c10_library() -> Path:
    """Where the allocator is."""
    return Path(torch.__file__).parent / "lib" / ("libc10.dylib" if sys.platform == "darwin" else "libc10.so")


def wait_for_other_threads() -> None:
    """Wait until every other thread of this process sleeps, for half a second at most. One of gloo's lets go of a result a moment
    after whoever waits for it goes on: until then it would count as held, or as freed later."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    until_s = time.monotonic() + LET_GO_S
    while True:
        time.sleep(0.001)  # without the interpreter's lock, for which a thread that lets go of a tensor may wait
        if time.monotonic() > until_s or not _another_runs():
            return


def _another_runs() -> bool:
    """Whether a thread other than this one has a core, or would take one; not known where there is no `TASKS`."""
    others = (task for task in TASKS.glob("*") if int(task.name) != threading.get_native_id())
    return any(_state(task) != "S" for task in others)


def _state(task: Path) -> str:
    """Of a thread: the letter behind its name, which may itself have brackets. One that has just ended sleeps."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "S"


@final
class CpuMeter(ActivationMeter):
    """Counts on the CPU. It can be used neither inside itself nor inside another profiler: PyTorch runs one at a time."""

    def __enter__(self) -> CpuMeter:
        remember_blocks()
        self._names: list[str] = []
        self._profiler = profile(profile_memory=True)
        with nothing_printed(STANDARD_ERROR):
            self._profiler.__enter__()
        self.mark(_ENTER)
        return self

    def mark(self, name: str) -> None:
        wait_for_other_threads()
        with record_function(f"{_MARK}{len(self._names)}"):
            torch.empty(1, device="cpu")
        self._names.append(name)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is None:
            self.mark(_EXIT)
        with nothing_printed(STANDARD_ERROR):
            self._profiler.__exit__(kind, error, traceback)
        if error is None:
            self.use = self._read(self._profiler.kineto_results)

    def _read(self, results: Any) -> MemoryUse:
        at_mark: dict[int, int] = {}
        most = [0] * len(self._names)  # from each mark to the next
        now = 0
        for _, mark, report in sorted(_reports(results.experimental_event_tree()), key=lambda each: each[0]):
            total = report.total_allocated
            if mark is not None and report.alloc_size > 0:
                now, total = mark, total - report.alloc_size
                at_mark[mark] = total
            if mark is None or mark == now:
                most[now] = max(most[now], total)
        entry, *inner = [(name, at_mark[index]) for index, name in enumerate(self._names)]
        level = entry[1]
        return MemoryUse(
            peak_bytes=max(most) - level,
            marks=tuple(Mark(name, total - level) for name, total in inner[:-1]),
            left_bytes=inner[-1][1] - level,
            peaks=tuple(Mark(name, peak - level) for (name, _), peak in zip(inner[:-1], most[1:], strict=False)),
        )


def _reports(tree: Any) -> Iterator[tuple[int, int | None, Any]]:
    """The CPU allocator's reports: when, the number of the mark that made it (None: the step itself), and what it says."""
    pending: list[tuple[int | None, Any]] = [(None, event) for event in tree]
    while pending:
        mark, event = pending.pop()
        if event.name.startswith(_MARK):
            mark = int(event.name.removeprefix(_MARK))
        if event.tag.name == "Allocation" and event.extra_fields.device.type == "cpu":
            yield event.start_time_ns, mark, event.extra_fields
        pending += [(mark, child) for child in event.children]
