"""Training without flushes (PipeDream-2BW) on one rank: replaces Megatron's schedule, and wraps the optimizer's step.

    pipeline = DoubleBuffered(model, optimizer, ...)
    for every batch:
        clear gradients                                       as Megatron's `train_step` does
        pipeline.forward_backward(forward_step, batches)      up to the last backward of this batch, some forwards of the next
        pipeline.update()                                     the optimizer's step, on the buffer that is retired

A batch that `drains` starts no forwards of the next one. Nothing is in flight behind its update: only then may weights be
evaluated, saved or changed, and the next batch fills the pipeline again. Versions are counted anew from there, so that going
on and resuming from what was saved are the same: a checkpoint holds one version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from megatron_lynx.double_buffered.buffers import TwoGradients, TwoLossScales, TwoVersions, owners
from megatron_lynx.double_buffered.exchange import Posted, Waiting
from megatron_lynx.double_buffered.interpreter import Interpreter
from megatron_lynx.double_buffered.match import check, check_no_plan
from megatron_lynx.double_buffered.stage_orders import order_of_batch, order_of_few_batches
from megatron_lynx.errors import HookRefused, Problem
from megatron_lynx.runtime.order import BatchListener, StageOrder
from megatron_lynx.schedule import one_f_one_b
from megatron_lynx.schedule.double_buffered import batch_order, deferral, defers_more_than_before, version_of
from megatron_lynx.schedule.schedule import Action


class DoubleBuffered:
    """One stage of a pipeline that trains without flushes.

    Args:
        model: this rank's list of one chunk, wrapped or not.
        optimizer: what `update` steps: Megatron's, or one of torch's.
        microbatches: of one batch, at least as many as there are stages.
        seq_length: tokens of a sequence.
        micro_batch_size: sequences of a micro-batch.
        defer_updates: every update of Megatron's optimizer is a barrier between all stages. Let those that would wait for the
            first one go on with the next batch meanwhile, into a second gradient buffer.

    Raises:
        ConfigError: fewer micro-batches than stages, or more than one chunk.
        HookRefused: the run uses something that does not go together with two versions.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        *,
        microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        defer_updates: bool = True,
    ) -> None:
        self._interpreter = Interpreter(
            model[0],
            microbatches=microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            exchange=Posted if defer_updates else Waiting,
            before=self._show,
        )
        self._pipeline, self._stage, self._microbatches = self._interpreter.pipeline, self._interpreter.stage, microbatches
        check(model, optimizer, self._pipeline, microbatches, defer_updates)
        self.optimizer = optimizer
        self.made_for = {"num_microbatches": microbatches, "seq_length": seq_length, "micro_batch_size": micro_batch_size}
        self.versions = TwoVersions(model[0].parameters(), lambda: owners(model[0], optimizer))
        self._deferral = deferral(self._stage) if defer_updates else 0
        self._postpones = defer_updates and defers_more_than_before(self._stage)
        self.gradients = TwoGradients(model[0]) if self._deferral else None
        self._scales = TwoLossScales(optimizer if defer_updates else None)
        self._batch = 0
        self._drains = True
        self._engine: BatchListener | None = None

    def _show(self, action: Action) -> None:
        """The weights that this micro-batch sees, the scale of its loss, and the gradient that it adds to."""
        version = version_of(action.micro_batch, self._microbatches)
        self.versions.show(version)
        if action.kind == "B":
            self._scales.show(version)
            if self.gradients is not None:
                self.gradients.show(action.micro_batch // self._microbatches)

    @property
    def drained(self) -> bool:
        """Whether nothing is in flight behind the batch that was run last: the same on all stages."""
        return self._drains

    @property
    def in_flight(self) -> int:
        """Micro-batches of the next batch that had their forward, but no backward yet."""
        return len(self._interpreter.in_flight)

    def forward_backward(self, forward_step_func: Callable[..., Any], batches: Any, *, drains: bool = False) -> list[Any]:
        """All backwards of one batch; its gradient is then reduced, and the parameters are the newest version.

        Args:
            forward_step_func: as Megatron's schedules take it.
            batches: an iterator that goes on from call to call, for forwards run ahead of their batch.
            drains: whether the pipeline is to be empty afterwards.

        Returns:
            What the loss function reported, by micro-batch of this batch: on the last stage, elsewhere nothing.

        Raises:
            HookRefused: a plan was installed since, and not for this pipeline.
        """
        self._announce(drains)
        steps = batch_order(self._pipeline, self._stage, self._microbatches, self._batch, deferral=self._deferral, drains=drains)
        actions = [step for step in steps if isinstance(step, Action)]
        then = None if drains else self._next_forward()
        postpones = self._postpones and not drains
        losses = self._interpreter.run(actions, forward_step_func, batches, batch=self._batch, then=then, postpones=postpones)
        self._show_newest()
        self._drains = drains
        return losses

    def _show_newest(self) -> None:
        """Show the newest weights and scales: these are read, logged and saved between batches."""
        self.versions.show(self.versions.newest)
        self._scales.show(self.versions.newest)

    def _announce(self, drains: bool) -> None:
        if self._engine is None:
            check_no_plan()
            return
        size = self._pipeline, self._stage, self._microbatches
        order = order_of_batch(*size, self._batch, deferral=self._deferral, drains=drains)
        self._engine.begin_batch(order, fills=self._batch == 0)

    def update(self, step: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step, with the gradient that `forward_backward` left. Returns what the step returns.

        Args:
            step: what to call; by default the optimizer's own.
        """
        version = version_of(self._batch * self._microbatches, self._microbatches)
        with self.versions.update(), self._scales.update(version):
            result = (step or self.optimizer.step)()
        self._batch += 1
        if self._drains:
            self._start_anew()
        return result

    def check_drained(self, what: str) -> None:
        """Raise `HookRefused`, on all stages alike, if the last batch did not drain: `what` needs one version of the weights."""
        if not self._drains:
            found = f"forwards of the next batch have begun ({self.in_flight} on this stage)"
            problem = Problem("pipeline", found, "an empty one", "let the batch before it drain")
            raise HookRefused(f"{what} while micro-batches are in flight", [problem])

    # --- under a plan (`runtime.order`) --------------------------------------------------------------------------

    def few_batches(self, microbatches: int) -> StageOrder:
        """What this stage does from filling to draining."""
        return order_of_few_batches(self._pipeline, self._stage, microbatches)

    def as_recorded(self, micro_batch: int) -> AbstractContextManager[None]:
        """The weights that this micro-batch (counted since the pipeline was filled) sees."""
        return self.versions.seen(version_of(micro_batch, self._microbatches))

    def under(self, engine: BatchListener | None) -> None:
        """From the next batch on a plan is in force, whose engine this is; None: no plan is."""
        self._engine = engine

    def _start_anew(self) -> None:
        self._batch = 0
        self.versions.start_anew()
        if self.gradients is not None:
            self.gradients.start_anew()
        self._scales.start_anew()

    def _next_forward(self) -> Action:
        """The first forward that this batch leaves to the next."""
        ahead = one_f_one_b.warmup(self._pipeline, self._stage) + self._deferral
        return Action((self._batch + 1) * self._microbatches + ahead, "F")
