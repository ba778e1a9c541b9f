"""`--lynx-trace`: the timeline of one step, all ranks, in one file for ui.perfetto.dev.

    step 1, 2        step 3 (--lynx-trace-step)                                    step 4 ...
    nothing          barrier │ every rank records │ gathered on rank 0, written    nothing

A whole run's events would not fit in memory; one step shows what a plan does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from megatron_lynx.errors import ConfigError
from megatron_lynx.launch.agreement import gathered_on_rank_0, on_rank_0
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.timeline import Span, timeline_of


class TraceFile:
    """Counts steps until the one that is traced, and writes its trace. Without a path it does nothing."""

    def __init__(self, path: Path | None, step: int) -> None:
        self._path = path
        self._step = step
        self._steps = 0

    @property
    def comes(self) -> bool:
        """Whether the next step is the one to be traced."""
        return self._path is not None and self._steps + 1 == self._step

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
        self._write(self._path, gathered_on_rank_0(trace.stop()))

    def _write(self, path: Path, events: list[list[Span]]) -> None:
        if not events:
            return
        from megatron_lynx.timeline import write_trace

        try:
            write_trace(timeline_of(dict(enumerate(events))), path)
        except ConfigError as error:  # the disk is full, say; a trace is no reason to stop training
            on_rank_0(f"megatron-lynx: no trace: {error}")
        else:
            on_rank_0(f"megatron-lynx: step {self._step} of this run is traced in {path}")
