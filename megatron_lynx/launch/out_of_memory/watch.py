"""Watches for a rank that fails, above all out of device memory: it prints why, and all ranks exit.

    before the model is built   the plan is known           reported with the run's progress
    the training loop           the models are known        ... and the moment of the step
    a step                      what has run is known       ... and whether the optimizer had its state

The first rank explains. Others that run out of memory print one line, and those that fail because it is gone print nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_lynx.apply.live_run import LiveRun, live_run
from megatron_lynx.apply.releases import installed_version
from megatron_lynx.errors import LynxError
from megatron_lynx.launch.ending import LastWord
from megatron_lynx.launch.message import stop
from megatron_lynx.launch.out_of_memory.explanation import OutOfDeviceMemory, explained, has_state
from megatron_lynx.launch.out_of_memory.moment import Rank
from megatron_lynx.plan import Plan
from megatron_lynx.torch_release import nccl_ub_stands_alone


class MemoryWatch:
    """Watches one process. Does nothing without a plan. `how_far` returns the progress of the run in words."""

    def __init__(self, how_far: Callable[[], str]) -> None:
        self._how_far = how_far
        self._plan: Plan | None = None
        self._path = ""
        self._run: LiveRun | None = None
        self._optimizer: Any = None
        self._stepped = False
        self._last_word: LastWord | None = None

    def under(self, plan: Plan | None, path: str) -> None:
        """Watch runs under this plan from now on. Call after torch.distributed is initialised."""
        self._plan, self._path = plan, path
        self._last_word = None if plan is None else LastWord()

    def trains(self, model: Any, optimizer: Any) -> None:
        """Remember the model and optimizer of the training loop."""
        run = live_run(model)
        self._run = run if isinstance(run, LiveRun) else None
        self._optimizer, self._stepped = optimizer, has_state(optimizer)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn an out-of-memory error inside into ours, with the original as its cause."""
        try:
            yield
        except Exception as error:
            if self._plan is None or self._last_word is None or isinstance(error, OutOfDeviceMemory):
                raise
            found = explained(error, self._rank(self._plan), self._how_far(), self._path)
            if found is not None:
                raise (found if self._last_word.is_first() else found.too()) from error
            if not isinstance(error, LynxError):
                self._last_word.follow()
            elif not self._last_word.is_first():
                self._last_word.follow(error.exit_status)
            raise

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch one step, after which the optimizer has its state. On an error of ours, exit at once: Megatron's clean-up could
        wait for
        other ranks.
        """
        try:
            with self.watching():
                yield
        except LynxError as error:
            if dist.is_initialized():
                stop(error)
            raise
        self._stepped = True

    def _rank(self, plan: Plan) -> Rank:
        if self._run is None:
            return Rank(plan, _stage_of_rank())
        return Rank(plan, self._run.stage, self._run.chunks, self._optimizer, self._stepped, _may_grow(self._run))


def _stage_of_rank() -> int:
    """The stage, before a model is built."""
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_rank()) if parallel_state.model_parallel_is_initialized() else 0


def _may_grow(run: LiveRun) -> bool:
    """Whether expandable segments of the allocator are possible."""
    registers = any(getattr(getattr(wrapper, "ddp_config", None), "nccl_ub", False) for wrapper in run.wrappers)
    return not (registers and nccl_ub_stands_alone(torch.__version__, installed_version()))
