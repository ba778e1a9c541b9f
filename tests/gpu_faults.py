"""Parts of the acceptance run in which something goes wrong on purpose, each in what a real part would show."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu_check.part import Answer
from scripts.gpu_check.trial import Setting, trial


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
    """Replays on rank 1 draw what comes next instead of what their forward drew."""
    from megatron_lynx.runtime.replay import Replayer

    run = Replayer.run

    def running(self: Any) -> Any:
        if rank == 1 and self.frame.random is not None:
            self.frame.random = self._random.capture()
        return run(self)

    return _with(Replayer, "run", running, rank, setting)


def with_too_early_uses(rank: int, setting: Setting) -> Answer:
    """Under a plan nobody waits for the first collective that a backward issues."""
    from megatron_lynx.runtime.waits import Waits

    window = Waits._window

    def not_waiting(self: Any, address: Any, micro_batch: Any, phase: Any, wait: Any) -> Any:
        early = str(address).startswith("bwd.") and str(address).split(".")[2].startswith("0")
        return window(self, address, micro_batch, phase, (lambda: None) if early else wait)

    return _with(Waits, "_window", not_waiting, rank, setting)


def without_overlap(rank: int, setting: Setting) -> Answer:
    """Every window waits first, and does behind the collective what was to run beside it."""
    from megatron_lynx.runtime.waits import Waits

    window = Waits._window

    def waiting_first(self: Any, address: Any, micro_batch: Any, phase: Any, wait: Any) -> Any:
        waited = wait()
        window(self, address, micro_batch, phase, lambda: None)
        return waited

    return _with(Waits, "_window", waiting_first, rank, setting)


def _with(owner: Any, name: str, wrong: Any, rank: int, setting: Setting) -> Answer:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, wrong)
        return trial(rank, setting)
