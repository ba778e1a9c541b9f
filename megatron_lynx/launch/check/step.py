"""One checked step of Megatron's: passes over it, each from the same state and the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megatron_lynx.apply import Installation
from megatron_lynx.apply.assignment import order_of
from megatron_lynx.apply.live_run import LiveRun, live_run
from megatron_lynx.launch.check.batches import DataIterators
from megatron_lynx.launch.check.outcome import Difference, Outcome, differences
from megatron_lynx.launch.check.reference import Need, ReferenceSetting, stock
from megatron_lynx.launch.check.training_state import TrainingState

Schedule = Callable[..., Any]
"""Megatron's `forward_backward_func`, called with keywords."""


class Step:
    """A step that runs several times where Megatron would have run it once. The pass that training goes on from runs last."""

    def __init__(
        self,
        schedule: Schedule,
        model: Any,
        data_iterator: Any,
        others: dict[str, Any],
        optimizer: Any,
        installation: Installation,
    ) -> None:
        run = live_run(model)
        assert isinstance(run, LiveRun)  # the plan is installed for it
        self.run = run
        self._schedule = schedule
        self._model = model
        self._optimizer = optimizer
        self._installation = installation
        self._iterators = DataIterators(data_iterator)
        self._others = others
        self._state = TrainingState(run.chunks)  # [1]
        self._fresh = True

    def planned(self) -> Any:
        """The losses of a pass under the plan. [4]"""
        trace = self._installation.engine.trace
        with self._once_more():
            if trace.enabled:
                trace.start()  # without what ran before
            return self._pass()

    def stock(self, setting: ReferenceSetting) -> Outcome:
        with self._once_more(), self._installation.lifted(), stock(setting, self.run.chunks):
            return Outcome.of(self._pass(), self.run.chunks).on_host()

    def measured(self) -> Need:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with self._once_more():
            self._pass()
        counts = self._installation.engine.take_counts()
        run, microbatches = self.run, self._others["num_microbatches"]
        passes = microbatches * len(run.chunks)
        let_go = (counts.let_go_bytes + counts.offloaded_bytes) // passes
        return Need(torch.cuda.max_memory_allocated() - before, let_go * _most_in_flight(run, microbatches))

    def differences(
        self, one: Outcome, other: Outcome, names: tuple[str, str], tolerances: Mapping[str, float] = MappingProxyType({})
    ) -> list[Difference]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return differences(one, other, rank=rank, stage=self.run.stage, names=names, tolerances=tolerances)

    def _pass(self) -> Any:
        return self._schedule(model=self._model, data_iterator=self._iterators.stand_in, **self._others)

    @contextmanager
    def _once_more(self) -> Iterator[None]:
        """Restore the state in which Megatron called its schedule: gradients are zero, nothing was read."""
        if not self._fresh:
            self._state.restore()
            self._iterators.again()
            for chunk in self._model:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            torch.cuda.empty_cache()  # one pass's blocks would be the next one's fragments
        self._fresh = False
        yield


def _most_in_flight(run: LiveRun, microbatches: int) -> int:
    count = most = 0
    for turn, _ in order_of(run.pipeline, run.stage, len(run.chunks), run.group_size)(microbatches).all:
        count += 1 if turn.kind == "F" else -1
        most = max(most, count)
    return most
