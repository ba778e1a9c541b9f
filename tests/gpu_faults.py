"""Parts of the acceptance run in which something goes wrong on purpose, each in what a real part would show."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts.gpu_check.part import Answer
from scripts.gpu_check.trial import Setting, trial
from tests.streams import faults


def hanging(rank: int) -> Answer:
    """The last rank never answers."""
    if rank > 0:
        time.sleep(600)
    return Answer()


def where_it_is(rank: int) -> Answer:
    """Nothing goes wrong."""
    said = {name: os.environ.get(name) for name in ("LOCAL_RANK", "NCCL_HOSTID", "CUDA_MPS_PIPE_DIRECTORY")}
    return Answer(stock_s=1.0, ours_s=1.0, figures={**said, "process": os.getpid()})


def raising(rank: int) -> Answer:
    """The last rank raises, and NCCL has written why."""
    if rank > 0:
        Path(os.environ["NCCL_DEBUG_FILE"]).write_text(f"NCCL WARN of rank {rank}\n")
        raise ValueError("a rank that cannot go on")
    return Answer()


def killed(rank: int) -> Answer:
    """The last rank is gone, as where a machine is short of memory."""
    if rank > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return Answer()


def with_other_masks(rank: int, setting: Setting) -> Answer:
    with another_mask(rank):
        return trial(rank, setting)


@contextmanager
def another_mask(rank: int = 1) -> Iterator[None]:
    """Recomputations on rank 1 draw what comes next instead of what their forward drew."""
    from megatron_lynx.runtime.recompute import Recomputer

    run = Recomputer.run

    def running(self: Any) -> Any:
        if rank == 1 and self.frame.random is not None:
            self.frame.random = self._random.capture()
        return run(self)

    with ExitStack() as undo:
        faults.replace_function(undo, Recomputer, "run", running)
        yield


def with_too_early_uses(rank: int, setting: Setting) -> Answer:
    with faults.a_collective_that_is_not_waited_for():
        return trial(rank, setting)


def without_overlap(rank: int, setting: Setting) -> Answer:
    with faults.a_window_behind_its_wait():
        return trial(rank, setting)
