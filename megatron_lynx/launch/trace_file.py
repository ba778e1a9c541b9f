"""`--lynx-trace`: the timeline of one step, all ranks, in one file for ui.perfetto.dev.

    step 1, 2        step 3 (--lynx-trace-step)                                    step 4 ...
    nothing          barrier │ every rank records │ gathered on rank 0, written    nothing

A whole run's events would not fit in memory; one step shows what a plan does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch.agreement import on_rank_0
from megatron_lynx.runtime.trace import Span, Trace


class TraceFile:
    """Counts steps until the one that is traced, and writes its trace. Without a path it does nothing."""

    def __init__(self, path: Path | None, step: int) -> None:
        self._path = path
        self._step = step
        self._steps = 0

    def problems(self) -> Iterator[Problem]:
        """Whether rank 0 could write it; asked before training, not after."""
        if self._path is None or _rank() != 0:
            return
        if self._path.is_dir():
            yield Problem("--lynx-trace", f"{self._path}, a folder", "a file that can be written")
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._path.parent):
                pass
        except OSError as error:
            yield Problem("--lynx-trace", f"{self._path} ({error.strerror})", "a file that can be written")

    @contextmanager
    def around(self, trace: Trace) -> Iterator[None]:
        """Runs one step, and records it if it is the one to be traced."""
        self._steps += 1
        if self._path is None or self._steps != self._step:
            yield
            return
        if dist.is_initialized():
            dist.barrier()  # the ranks' clocks begin together
        trace.start()
        yield
        self._write(self._path, _gathered(trace.stop()))

    def _write(self, path: Path, events: list[list[Span]]) -> None:
        if not events:
            return
        from megatron_lynx.compare.perfetto import write_trace
        from megatron_lynx.simulator.timeline import timeline_of

        try:
            write_trace(timeline_of(dict(enumerate(events))), path)
        except ConfigError as error:  # the disk is full, say; a trace is no reason to stop training
            on_rank_0(f"megatron-lynx: no trace: {error}")
        else:
            on_rank_0(f"megatron-lynx: step {self._step} of this run is traced in {path}")


def _gathered(events: list[Span]) -> list[list[Span]]:
    """All ranks' events on rank 0; elsewhere nothing."""
    if not dist.is_initialized():
        return [events]
    gathered: list[list[Span]] = [[] for _ in range(dist.get_world_size())] if _rank() == 0 else []
    dist.gather_object(events, gathered or None)
    return gathered


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
