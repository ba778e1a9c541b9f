"""Training without flushes (PipeDream-2BW) on one rank: replaces Megatron's schedule, and wraps the optimizer's step.

    pipeline = DoubleBuffered(model, optimizer, ...)
    for every batch:
        clear gradients                                       as Megatron's `train_step` does
        pipeline.forward_backward(forward_step, batches)      up to the last backward of this batch, some forwards of the next
        pipeline.update()                                     the optimizer's step, on the retired buffer

A batch that `drains` starts no forwards of the next one. All micro-batches are done after its update: only then may weights be
evaluated, saved or changed, and the next batch fills the pipeline again. Versions are counted from there, so that continuing
equals resuming from a checkpoint, which has one version.

`claims` are the hooks on Megatron's training loop.

Replaces              `get_forward_backward_func` in the module of the training loop (`megatron.training.training`), and `step` of
                      its optimizer.
Why                   the loop's order stays: clear gradients, forward and backward, step. The replaced function leaves forwards
                      of the next batch in flight, and the step writes the retired buffer.
Calls the original    `step` once per call; Megatron's own function if it only runs forward.
Holds                 the pipeline.
Passes through when   `forward_only`: an evaluation. It is refused while micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_lynx.apply.hook import MARK, Claim
from megatron_lynx.double_buffered import releases
from megatron_lynx.double_buffered.buffers import TwoGradients, TwoVersions, owners
from megatron_lynx.double_buffered.interpreter import Interpreter
from megatron_lynx.errors import ConfigError, HookRefused, Problem
from megatron_lynx.limits import refused
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule import double_buffered
from megatron_lynx.schedule.double_buffered import batch_order, deferral, defers_more_than_before, version_of
from megatron_lynx.schedule.flushes import warmup
from megatron_lynx.schedule.schedule import Action, VirtualMicroBatch, phases_of


class DoubleBuffered:
    """One stage of a pipeline that trains without flushes.

    Args:
        model: this rank's list of one chunk, wrapped or not.
        optimizer: Megatron's, or one of torch's; stepped by `update`.
        microbatches: of one batch, at least as many as there are stages.
        defer_updates: whether stages that would wait for the first one at an update, a barrier between all stages, continue with
            the next batch, in a second gradient buffer.

    Raises:
        ConfigError: fewer micro-batches than stages, or more than one chunk.
        HookRefused: the run uses a feature that two versions do not support.
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
            before=self._show,
        )
        self._pipeline, self._stage, self._microbatches = self._interpreter.pipeline, self._interpreter.stage, microbatches
        check_run(model, optimizer, self._pipeline, microbatches, defer_updates)
        self.optimizer = optimizer
        self.made_for = {"num_microbatches": microbatches, "seq_length": seq_length, "micro_batch_size": micro_batch_size}
        self.versions = TwoVersions(model[0].parameters(), lambda: owners(model[0], optimizer))
        self._deferral = deferral(self._stage) if defer_updates else 0
        self._postpones = defer_updates and defers_more_than_before(self._stage)
        self.gradients = TwoGradients(model[0]) if self._deferral else None
        self._batch = 0
        self.drained = True
        """Whether no micro-batch is in flight after the last batch: the same on all stages."""
        self._engine: Engine | None = None

    def _show(self, action: Action) -> None:
        self.versions.show(version_of(action.micro_batch, self._microbatches))
        if action.kind == "B" and self.gradients is not None:
            self.gradients.show(action.micro_batch // self._microbatches)

    def forward_backward(self, forward_step_func: Callable[..., Any], batches: Any, *, drains: bool = False) -> list[Any]:
        """Run all backwards of one batch and reduce its gradient. Parameters are the newest version afterwards.

        `batches`: an iterator that continues from call to call, for forwards that run ahead of their batch. `drains`: whether the
        pipeline must be empty afterwards. Returns as `Interpreter.run`. Raises `HookRefused` if a plan was installed since, and
        not for this pipeline.
        """
        self._announce(drains)
        actions = batch_order(
            self._pipeline, self._stage, self._microbatches, self._batch, deferral=self._deferral, drains=drains
        )
        ahead = warmup(self._pipeline, self._stage) + self._deferral
        then = None if drains else Action((self._batch + 1) * self._microbatches + ahead, "F")
        postpones = self._postpones and not drains
        losses = self._interpreter.run(actions, forward_step_func, batches, batch=self._batch, then=then, postpones=postpones)
        self.versions.show(self.versions.newest)  # they are read, logged and saved between batches
        self.drained = drains
        return losses

    def _announce(self, drains: bool) -> None:
        if self._engine is None:
            if problems := list(_of_a_plan()):  # it ignores versions, and would recompute with wrong weights
                raise HookRefused("a plan was installed into a run without flushes", problems)
            return
        size = self._pipeline, self._stage, self._microbatches
        order = order_of_batch(*size, self._batch, deferral=self._deferral, drains=drains)
        self._engine.begin_batch(order, fills=self._batch == 0)

    def update(self, step: Callable[[], Any] | None = None) -> Any:
        """Run the optimizer's step, or `step` instead, and return its result."""
        with self.versions.update():
            result = (step or self.optimizer.step)()
        self._batch += 1
        if self.drained:
            self._start_anew()
        return result

    def check_drained(self, what: str) -> None:
        """Raise `HookRefused`, on all stages alike, if the last batch did not drain: `what` needs one version of the weights."""
        if not self.drained:
            state = f"forwards of the next batch have begun ({len(self._interpreter.in_flight)} on this stage)"
            problem = Problem("pipeline", state, "an empty one", "let the batch before it drain")
            raise HookRefused(f"{what} while micro-batches are in flight", [problem])

    # --- under a plan (`runtime.order`) --------------------------------------------------------------------------

    def as_recorded(self, micro_batch: int) -> AbstractContextManager[None]:
        return self.versions.seen(version_of(micro_batch, self._microbatches))

    def under(self, engine: Engine | None) -> None:
        self._engine = engine

    def _start_anew(self) -> None:
        self._batch = 0
        self.versions.start_anew()
        if self.gradients is not None:
            self.gradients.start_anew()


OPTIMIZERS = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, torch.optim.Optimizer)
"""Optimizers whose tensors that share memory with weights are known (`double_buffered.buffers`)."""


def check_run(
    model: Sequence[torch.nn.Module], optimizer: Any, pipeline: int, microbatches: int, defer_updates: bool = False
) -> None:
    """Raises as `DoubleBuffered`."""
    double_buffered.check(pipeline, microbatches)
    if len(model) != 1:
        problem = Problem("model chunks of a stage", str(len(model)), "1", "train without interleaving")
        raise ConfigError("only plain 1F1B can run without flushes", [problem])
    problems = list(_refusals(model[0], optimizer))
    if defer_updates:
        problems += _refusals_of_deferral(model[0])
    if problems:
        raise HookRefused("this run cannot keep two versions of its weights", problems)


def _refusals(chunk: torch.nn.Module, optimizer: Any) -> Iterator[Problem]:
    yield from releases.stale()
    yield from _unproven("model", get_model_config(chunk))
    yield from _unproven("ddp", getattr(chunk, "ddp_config", None))
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from _unproven("optimizer", getattr(part, "config", None))
        if not isinstance(part, OPTIMIZERS):
            names = ", ".join(known.__name__ for known in OPTIMIZERS)
            yield Problem("optimizer", type(part).__name__, f"one of {names}", "what it keeps of the weights is not known")
    for name, parameter in chunk.named_parameters():
        if type(parameter.data) is not torch.Tensor:
            yield Problem(f"parameter {name}", type(parameter.data).__name__, "a plain tensor")
    yield from _of_a_plan()


def _of_a_plan() -> Iterator[Problem]:
    if getattr(schedules.forward_step, MARK, False):
        state, todo = "a plan that is installed", "install it behind the pipeline: install(model, plan, without_flushes=pipeline)"
        yield Problem("schedules.forward_step", state, "none", todo)


def _refusals_of_deferral(chunk: torch.nn.Module) -> Iterator[Problem]:
    if not hasattr(chunk, "ddp_config"):
        yield Problem("model", type(chunk).__name__, "Megatron's DistributedDataParallel", "wrap it, or do not defer updates")
    yield from _unproven("ddp", getattr(chunk, "ddp_config", None), "deferred updates")


def _unproven(of: str, config: Any, under: str = "two versions") -> Iterator[Problem]:
    yield from refused(config, [under], lambda limit: f"{of.replace('ddp', 'DDP')} config: {limit.setting}", of=[of])


def order_of_batch(pipeline: int, stage: int, microbatches: int, batch: int, *, deferral: int, drains: bool) -> StageOrder:
    """Return the passes of a batch's run, and of the next run, whose offloaded tensors return before it begins."""
    batches = [batch] if drains else [batch, batch + 1]
    runs = [batch_order(pipeline, stage, microbatches, index, deferral=deferral, drains=drains) for index in batches]
    completing = {virtual for index, run in zip(batches, runs, strict=True) for virtual in _completing(run, microbatches, index)}
    steps = [step for run in runs for step in run]
    ahead = warmup(pipeline, stage)
    return StageOrder([*phases_of(steps, ahead, in_flight=ahead if batch else 0)], completing)


def _completing(run: Sequence[Action], microbatches: int, batch: int) -> set[VirtualMicroBatch]:
    """Backwards of a run after which gradients may be read or moved: the last one of its batch, and the run's last."""
    backwards = [step for step in run if step.kind == "B"]
    last = (batch + 1) * microbatches - 1
    return {step.virtual for step in backwards if step is backwards[-1] or step.micro_batch == last}


UNPROVEN = (
    "collect_non_loss_data",
    "adjust_tensor_shapes_fn",
    "force_all_reduce",
    "decoder_seq_length",
    "p2p_communicator",
    "pg_collection",
)
"""Arguments of Megatron's schedules that schedules without flushes do not support."""


def claims(loop: Any, pipeline: DoubleBuffered, drains: Callable[[], bool]) -> Iterator[Claim]:
    """Yield the claims for a run that has not begun. `loop`: the module of the training loop. `drains`: called before each batch:
    whether the pipeline must be empty after it. Must be equal on all ranks."""

    def get_function(original: Any) -> Any:
        @wraps(original)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            return _without_flushes(original(*args, **kwargs), pipeline, drains)

        return get_forward_backward_func

    def step(original: Any) -> Any:
        @wraps(original)
        def updating(*args: Any, **kwargs: Any) -> Any:
            return pipeline.update(lambda: original(*args, **kwargs))

        return updating

    yield Claim(loop, "get_forward_backward_func", get_function, "runs micro-batches without flushes")
    yield Claim(pipeline.optimizer, "step", step, "updates the version that is retired")


def _without_flushes(stock: Any, pipeline: DoubleBuffered, drains: Callable[[], bool]) -> Any:
    @wraps(stock)
    def forward_backward(*, forward_step_func: Any, data_iterator: Any, **settings: Any) -> Any:
        if settings.get("forward_only"):
            pipeline.check_drained("evaluation")
            return stock(forward_step_func=forward_step_func, data_iterator=data_iterator, **settings)
        if problems := list(_changed(pipeline, settings)):
            raise HookRefused("a batch is not as the pipeline was made for", problems)
        batches = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
        return pipeline.forward_backward(forward_step_func, batches, drains=drains())

    return forward_backward


def _changed(pipeline: DoubleBuffered, settings: dict[str, Any]) -> Iterator[Problem]:
    for name, needed in pipeline.made_for.items():
        if settings.get(name) != needed:
            yield Problem(name, str(settings.get(name)), str(needed), "batch sizes may not ramp up")
    for name in UNPROVEN:
        if settings.get(name):
            yield Problem(name, str(settings[name]), "none")
