"""Training without flushes (PipeDream-2BW) on one rank: replaces Megatron's schedule, and wraps the optimizer's step.

    pipeline = DoubleBuffered(model, optimizer, ...)
    for every batch:
        clear gradients                                       as Megatron's `train_step` does
        pipeline.forward_backward(forward_step, batches)      up to the last backward of this batch, some forwards of the next
        pipeline.update()                                     the optimizer's step, on the retired buffer

A batch that `drains` starts no forwards of the next one. After its update weights may be evaluated, saved or changed, and
versions are counted anew, so that continuing equals resuming from a checkpoint.

The weights have two versions, in alternating buffers (`TwoVersions`):

                 start      U0              U1              U2                    Uj the update of batch j
    buffer 0     W(0)       W(0)            copied, W(2)    W(2)
    buffer 1     free       copied, W(1)    W(1)            copied, W(3)
    batch reads  0: W(0)    1: W(0)         2: W(1)         3: W(2)               the older one
    owned        W(0)       W(1)            W(2)            W(3)                  the newer one: by the optimizer and DDP

At update j the buffer of version j - 1 is filled with version j, all owners of the weights are pointed at it, and the optimizer
steps there in place: micro-batches in flight read the same memory in backward as in forward. One of two gradient buffers
(`TwoGradients`) has a batch's whole gradient until its deferred update, the other one starts the next batch's:

    deferral 2      B(j, last)   B(j+1, 0)   B(j+1, 1)   Uj        B(j+1, 2) ...
    buffer j mod 2   += ─────────  whole gradient of batch j ── step, then cleared for batch j + 2
    buffer j+1 mod 2              += ──────── += ────────────────── += ...

Between calls gradients are at the batch that was updated last, which Megatron clears before each step.

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

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, Literal

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_lynx.apply.hook import MARK, Claim, instead
from megatron_lynx.double_buffered import releases
from megatron_lynx.double_buffered.interpreter import Interpreter
from megatron_lynx.errors import ConfigError, HookRefused, Problem
from megatron_lynx.limits import refused
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.order import StageOrder
from megatron_lynx.schedule import double_buffered
from megatron_lynx.schedule.double_buffered import batch_order, buffer_of, deferral, defers_more_than_before, version_of
from megatron_lynx.schedule.flushes import warmup
from megatron_lynx.schedule.schedule import Action, VirtualMicroBatch, phases_of


class TwoBuffers:
    """Buffer 0 is the memory of `tensors`; buffer 1 is a second one of the same size, zeroed. Only `tensor.data` changes."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        first = [storage for storage in storages.values() if storage.nbytes()]
        twins = [torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device) for storage in first]
        self._buffers = first, [twin.untyped_storage() for twin in twins]
        self._place = {storage.data_ptr(): index for buffer in self._buffers for index, storage in enumerate(buffer)}

    @property
    def extra_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._buffers[1])

    def point(self, tensors: Iterable[torch.Tensor], buffer: int) -> None:
        """Point those of `tensors` that are in either buffer to the same place in this one."""
        for tensor in tensors:
            index = self._place.get(tensor.untyped_storage().data_ptr())
            if index is not None:
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                storage = self._buffers[buffer][index]
                tensor.data = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def copy(self, source: int, target: int) -> None:
        for original, copied in zip(self.memory(source), self.memory(target), strict=True):
            copied.copy_(original)

    def memory(self, buffer: int) -> list[torch.Tensor]:
        empties = [torch.empty(0, dtype=torch.uint8, device=storage.device) for storage in self._buffers[buffer]]
        return [
            empty.set_(storage, 0, (storage.nbytes(),), (1,))
            for empty, storage in zip(empties, self._buffers[buffer], strict=True)
        ]


class TwoVersions:
    """Two versions of one rank's weights. `owners`: returns the tensors that point into the parameters' memory now."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], owners: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = tuple(parameters)
        self._owners = owners
        self.buffers = TwoBuffers(self._parameters)
        self.newest = 0
        """Newest version, the optimizer's: updates since the start."""
        self._first_buffer = 0
        self._shown = 0

    @contextmanager
    def seen(self, version: int) -> Iterator[None]:
        shown = self._shown
        self.show(version)
        try:
            yield
        finally:
            self.show(shown)

    def show(self, version: int) -> None:
        assert max(self.newest - 1, 0) <= version <= self.newest, f"version {version} is gone or not there yet ({self.newest})"
        if version != self._shown:
            self.buffers.point(self._parameters, self._buffer(version))
            self._shown = version

    @contextmanager
    def update(self) -> Iterator[None]:
        """Run the optimizer's step inside: it writes the next version over the one before the newest."""
        self.show(self.newest)
        target = self._buffer(self.newest + 1)
        self.refill(self._buffer(self.newest), target)
        # keep the version counters that autograd compares: tensors saved of these parameters are in the other buffer
        with ExitStack() as counters:
            for parameter in self._parameters:
                counters.enter_context(_unsafe_preserve_version_counter(parameter))
            self.buffers.point(self._owners(), target)
            yield
        self.newest += 1
        self._shown = self.newest

    def refill(self, source: int, target: int) -> None:
        self.buffers.copy(source, target)

    def start_anew(self) -> None:
        """Count versions from the newest one. Only while none of the micro-batches is in flight."""
        self.show(self.newest)
        self._first_buffer, self.newest, self._shown = self._buffer(self.newest), 0, 0

    def _buffer(self, version: int) -> int:
        return buffer_of(version + self._first_buffer)


class TwoGradients:
    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self.buffers = TwoBuffers(gradient_owners(chunk))
        self._first_buffer = 0
        self._shown = 0
        self._awaited: list[Any] = []
        """Reductions that were waited for, and that DDP has not ended yet."""

    def show(self, batch: int) -> None:
        if batch != self._shown:
            self._wait_for_reductions()
            self.buffers.point(gradient_owners(self._chunk), buffer_of(batch + self._first_buffer))
            self._shown = batch

    def _wait_for_reductions(self) -> None:
        """Wait once for each reduction that DDP began, while its batch is shown: then gloo copies its result to where the tensors
        point. DDP waits again when it ends the reduction, when this batch is shown again."""
        handles = (group.grad_reduce_handle for group in self._chunk.bucket_groups)
        under_way = [handle for handle in handles if handle is not None]
        for handle in under_way:
            if not any(handle is awaited for awaited in self._awaited):
                handle.wait()
        self._awaited = under_way

    def hidden(self) -> list[torch.Tensor]:
        return self.buffers.memory(buffer_of(self._shown + self._first_buffer + 1))

    def start_anew(self) -> None:
        """Count batches from 0, in the shown buffer. Both must be free, or be cleared next."""
        self._first_buffer, self._shown = buffer_of(self._shown + self._first_buffer), 0


SHARDS = ("shard_float16_groups", "shard_fp32_groups")
"""Attributes of Megatron's distributed optimizer with groups of views into the flat buffer."""


def owners(chunk: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Return the tensors that share memory with weights, and must follow them.

    parameter.data                          all of them
    the flat buffer and its buckets         of DDP with the distributed optimizer, which gathers updated weights into them
    a rank's shards of the buckets          as DDP caches them between gathers
    a rank's shards of the parameters       of the distributed optimizer: fp32 ones are updated in place
    """
    tensors = [*chunk.parameters(), *_of_ddp(chunk, "param")]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        tensors += [tensor for name in SHARDS for group in getattr(part, name, []) for tensor in group]
    return (tensor for tensor in tensors if tensor is not None)


def gradient_owners(chunk: Any) -> Iterator[torch.Tensor]:
    yield from (parameter.main_grad for parameter in chunk.parameters() if hasattr(parameter, "main_grad"))
    yield from _of_ddp(chunk, "grad")


def _of_ddp(chunk: Any, data: Literal["param", "grad"]) -> Iterator[Any]:
    """Flat buffers, their buckets, and a rank's shards of these. (Buffers of experts are none: experts are refused.)"""
    if not hasattr(chunk, "bucket_groups"):
        return
    for buffer in chunk.buffers:
        yield from (getattr(flat, f"{data}_data") for flat in (buffer, *buffer.buckets))
    for group in chunk.bucket_groups:
        yield from (shard for shards in getattr(group, f"cached_{data}_buffer_shard_list") for shard in shards or ())


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
        pipeline must be empty afterwards. Returns as `Interpreter.run`. Raises `HookRefused` if another plan was installed since.
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
            self._batch = 0
            self.versions.start_anew()
            if self.gradients is not None:
                self.gradients.start_anew()
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


OPTIMIZERS = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, torch.optim.Optimizer)
"""Optimizers whose tensors that share memory with weights are known (`owners`)."""


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

    def get_function(original: Any, *args: Any, **kwargs: Any) -> Any:
        return _without_flushes(original(*args, **kwargs), pipeline, drains)

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        return pipeline.update(lambda: original(*args, **kwargs))

    yield Claim(loop, "get_forward_backward_func", instead(get_function), "runs micro-batches without flushes")
    yield Claim(pipeline.optimizer, "step", instead(step), "updates the version that is retired")


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
