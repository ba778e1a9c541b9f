"""What deferred weight gradients hold on a rank, and what is left of them when a step fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan

TRAINING = {"ddp": True}
FUSED = {"gradient_accumulation_fusion": True}


@dataclass
class Held:
    counted: list[int] = field(default_factory=list)
    """What the runtime said that entries hold, whenever one was queued or computed."""
    alive: list[int] = field(default_factory=list)
    """What tensors that were queued hold by then, as their memory is."""
    most: int = 0
    """The high-water mark of the counts."""
    graphs: int = 0
    """Operands that hold a graph behind them."""


def held_bytes(rank: int, job: Job, plan: Plan) -> Held:
    """In one step."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.training import synthetic_batches

    held = Held()
    with _training(job) as training, install(training.chunks, plan) as installation, _watched(held, installation.engine):
        training.step(synthetic_batches(job, 0))
        held.most = installation.engine.take_counts().deferred_bytes
    return held


@contextmanager
def _watched(held: Held, engine: Any) -> Iterator[None]:
    from megatron_lynx.runtime.weight_gradients import WeightGradients

    queued: list[weakref.ref[Any]] = []

    def note() -> None:
        storages = [tensor.untyped_storage() for one in queued if (tensor := one()) is not None]
        held.alive.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))
        held.counted.append(engine.weight_gradients.bytes)

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any) -> Any:
            if method.__name__ == "put_off":
                queued.extend(weakref.ref(operand) for operand in args[1])
                held.graphs += sum(operand.grad_fn is not None or operand._base is not None for operand in args[1])
            result = method(self, *args)
            del args
            note()
            return result

        return noted

    with ExitStack() as stack:
        for name in ("run", "flush"):
            stack.enter_context(mock.patch.object(WeightGradients, name, noting(getattr(WeightGradients, name))))
        stack.enter_context(mock.patch.object(WeightGradients, "put_off", noting(WeightGradients.put_off)))
        yield


def pending_when_reduced(rank: int, job: Job, plan: Plan, overlapped: bool) -> tuple[list[int], int]:
    """In one step: how many weight gradients of a bucket were pending whenever its reduction began, and how many were flushed."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

    from megatron_lynx.apply.hooks.weight_gradients import deferring_linears
    from megatron_lynx.apply.installation import install
    from megatron_lynx.apply.live_run import live_run
    from megatron_lynx.testbed.training import synthetic_batches

    seen: list[int] = []
    begin = _ParamAndGradBucketGroup.start_grad_sync
    with _training(job, overlap_grad_reduce=overlapped) as training, install(training.chunks, plan) as installation:
        modules = deferring_linears(plan, live_run(training.chunks))  # type: ignore[arg-type]
        weights = {(linear.layer, linear.item): module.weight for linear, module in modules.items()}

        def beginning(group: Any, *args: Any, **kwargs: Any) -> Any:
            pending = installation.engine.weight_gradients
            seen.append(sum(weights[linear] in group.params for linear, queue in pending._of.items() for _ in queue))
            return begin(group, *args, **kwargs)

        with mock.patch.object(_ParamAndGradBucketGroup, "start_grad_sync", beginning):
            for step in range(2):  # in the first one reductions wait for the end
                seen.clear()
                training.step(synthetic_batches(job, step))
        return seen, installation.engine.take_counts().flushed


def posted_and_computed(rank: int, job: Job, plan: Plan) -> list[str]:
    """In one step: `posted` for each exchange of messages, `computed` for each delayed weight gradient, in order."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.runtime.weight_gradients import WeightGradients
    from megatron_lynx.testbed.training import synthetic_batches

    seen: list[str] = []

    def noting(original: Callable[..., Any], what: str) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            seen.append(what)
            return result

        return noted

    with ExitStack() as stack:
        training = stack.enter_context(_training(job))
        stack.enter_context(install(training.chunks, plan))
        posting = noting(torch.distributed.batch_isend_irecv, "posted")
        stack.enter_context(mock.patch.object(torch.distributed, "batch_isend_irecv", posting))
        computing = noting(WeightGradients._compute, "computed")
        stack.enter_context(mock.patch.object(WeightGradients, "_compute", computing))
        training.step(synthetic_batches(job, 0))
    return seen


def held_and_given_back(rank: int, job: Job, plan: Plan) -> tuple[list[str], list[str]]:
    """What an installation holds for weight gradients, and what is another object when it was removed."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.apply.on_ranks import Attributes

    with _training(job) as training:
        training.step(synthetic_batches(job, 0))
        attributes = Attributes(torch.nn.ModuleList(training.chunks))
        with install(training.chunks, plan) as installation:
            training.step(synthetic_batches(job, 0))
            held = [hook.where for hook in installation.hooks if "weight gradient" in hook.reason]
        return sorted(held), attributes.changed()


@contextmanager
def _training(job: Job, **settings: Any) -> Iterator[Any]:
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    with stand_in_for_fused_gradient():
        seed_random_numbers(7)
        yield Training(job, build_model(job, **FUSED), **TRAINING, **settings)  # type: ignore[arg-type]


@dataclass
class Failed:
    said: str
    pending: int
    """Entries when the step failed, and behind that."""
    pending_then: int
    busy: bool
    differing: list[str]
    """Of the step behind it, what is not stock's."""


def failing(rank: int, job: Job, plan: Plan) -> Failed:
    """A step that fails in a backward with weight gradients pending, and one behind it; an evaluation between."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers

    with _training(job) as training:
        seed_random_numbers(7)
        stock = _step(training, job)
    with _training(job) as training, install(training.chunks, plan) as installation:
        seed_random_numbers(7)
        seen: list[int] = []
        said = _failed_step(training, job, installation.engine, seen)
        then, busy = len(installation.engine.weight_gradients), installation.engine.busy
        seed_random_numbers(7)
        ours = _step(training, job)
    return Failed(said, seen[0], then, busy, [name for name in stock if not torch.equal(stock[name], ours[name])])


def _step(training: Any, job: Job) -> dict[str, torch.Tensor]:
    from megatron_lynx.testbed.training import synthetic_batches

    losses = training.step(synthetic_batches(job, 0))
    return training.gradients() | {f"loss {at}": loss.detach().clone() for at, loss in enumerate(losses)}  # type: ignore[no-any-return]


def _failed_step(training: Any, job: Job, engine: Any, seen: list[int]) -> str:
    """The second micro-batch's backward fails at its end, in the first layer."""
    from megatron_lynx.testbed.training import synthetic_batches

    left = [2]

    def fail(gradient: Any) -> None:
        left[0] -= 1
        if not left[0]:
            seen.append(len(engine.weight_gradients))
            raise RuntimeError("a kernel failed")

    norm = training.chunks[0].module.decoder.layers[0].input_layernorm
    with mock.patch.object(type(norm), "forward", _with_hook(type(norm).forward, norm, fail)):
        try:
            training.step(synthetic_batches(job, 0))
        except RuntimeError as error:
            return str(error)
    return "nothing"


def _with_hook(forward: Any, one: Any, hook: Any) -> Any:
    def hooked(self: Any, hidden: torch.Tensor) -> Any:
        if self is one:
            hidden.register_hook(hook)
        return forward(self, hidden)

    return hooked
