"""What the tests of steps that fail, or that use more of torch than training does, run on ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.plan.plan import Plan

from ..testbed.on_ranks import same
from .on_ranks import one_step, trained

Seen = dict[str, Any]


def stock_and_planned(rank: int, job: Job, plan: Plan, trains: Callable[[Any], Seen]) -> dict[str, Any]:
    """`trains(training)` without and with the plan: what differs, and what the engine holds and counted at the end."""
    from megatron_lynx.apply.installation import install

    stock = trains(trained(job))
    training = trained(job)
    with install(training.chunks, plan) as installation:
        planned = trains(training)
        left = {"busy": installation.engine.busy, "frames": frames_alive(), "counts": installation.engine.take_counts()}
    return {"differing": [name for name in stock if not same(stock[name], planned[name])], **left}


def frames_alive() -> int:
    from megatron_lynx.runtime.frame import Frame

    return sum(isinstance(thing, Frame) for thing in gc.get_objects())


def step_seen(training: Any, number: int = 0) -> Seen:
    return {"losses": [loss.detach().clone() for loss in one_step(training, number)], **training.gradients()}


class Broken(Exception):
    """Raised by a user's hook."""


def fails_in_forward(training: Any) -> Seen:
    """A hook of the user's raises in the second micro-batch, in the middle of a half; the next step is a whole one."""
    calls: list[None] = []

    def hook(*_: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # a recomputation, which runs inside of a backward, may call it too
            calls.append(None)
            if len(calls) == 2:
                raise Broken

    return _fails_once(training, training.chunks[0].decoder.layers[1].mlp.linear_fc2.register_forward_pre_hook(hook))


def fails_in_backward(training: Any) -> Seen:
    """The gradient of a layer's output raises in the second micro-batch."""
    calls: list[None] = []

    def on_gradient(_: torch.Tensor) -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Broken

    def hook(module: Any, args: Any, output: Any) -> None:
        output[0].register_hook(on_gradient)

    return _fails_once(training, training.chunks[0].decoder.layers[1].mlp.linear_fc2.register_forward_hook(hook))


def _fails_once(training: Any, hook: Any) -> Seen:
    with suppress(Broken):
        one_step(training)
        raise AssertionError("the hook was never called twice")
    hook.remove()
    for parameter in training.parameters().values():
        parameter.grad = None
    gc.collect()
    return {**step_seen(training, 1), **{f"second {name}": value for name, value in step_seen(training, 2).items()}}


def evaluates(training: Any) -> Seen:
    """Forward only before and behind a step, gradients off as Megatron's training loop has them, and left on."""
    from megatron_lynx.testbed.training import synthetic_batches

    batches = synthetic_batches(training.job, 5)
    return {
        "before": training.evaluate(batches),
        **step_seen(training),
        **only_evaluates(training),
        "on": training.evaluate(batches),
    }


def only_evaluates(training: Any) -> Seen:
    from megatron_lynx.testbed.training import run_schedule, synthetic_batches

    batches = synthetic_batches(training.job, 5)
    with torch.no_grad():
        return {"evaluated": training.evaluate(batches), "training": run_schedule(training.chunks, training.job, batches, True)}


def with_user_hooks(training: Any) -> Seen:
    """Forward hooks, forward pre-hooks and backward hooks of the user's on everything."""
    layer = training.chunks[0].decoder.layers[1]
    with ExitStack() as undo:
        for module in layer.modules():
            undo.callback(module.register_forward_pre_hook(lambda *_: None).remove)
            undo.callback(module.register_forward_hook(lambda *_: None).remove)
        undo.callback(layer.mlp.register_full_backward_hook(lambda *_: None).remove)
        return step_seen(training)


def with_nvtx(training: Any) -> Seen:
    """Megatron's ranges switched on; torch's are answered by nothing, as there is no CUDA. Ranges must be popped as pushed."""
    from megatron.core import utils

    with ExitStack() as undo:
        for name in ("range_push", "range_pop"):
            undo.enter_context(patch.object(torch.cuda.nvtx, name, lambda *_: None))
        utils.configure_nvtx_profiling(True)
        undo.callback(utils.configure_nvtx_profiling, False)
        seen = step_seen(training)
    assert utils._nvtx_range_messages == []
    return seen


# --- what recomputations cannot give -------------------------------------------------------------------------------------


def asked_for_too_much(rank: int, job: Job, plan: Plan, asks: Callable[[Any], Any]) -> dict[str, Any]:
    """The error of `asks(training)` under the plan, and what of the step behind it differs from stock's."""
    from megatron_lynx.apply.installation import install

    stock = step_seen(trained(job))
    training = trained(job)
    with install(training.chunks, plan) as installation:
        error = _error_of(asks, training)
        _start_again(training)
        left = {"error": error, "busy": installation.engine.busy, "frames": frames_alive()}
        planned = step_seen(training)
    return {**left, "differing": [name for name in stock if not same(stock[name], planned[name])]}


def _error_of(asks: Callable[[Any], Any], training: Any) -> LynxError | None:
    try:
        asks(training)
    except LynxError as error:
        return error.with_traceback(None)
    return None


def _start_again(training: Any) -> None:
    from megatron_lynx.testbed.groups import seed_random_numbers

    seed_random_numbers(7)
    training.chunks[0].zero_grad(set_to_none=True)  # gradients with a graph of their own are a cycle
    gc.collect()


def _loss(training: Any, **kwargs: Any) -> torch.Tensor:
    """Of the logits: Megatron's cross entropy has no second backward."""
    from megatron_lynx.testbed.training import synthetic_batches

    batch = synthetic_batches(training.job)[0]
    loss: torch.Tensor = training.chunks[0](batch.tokens, batch.position_ids, None, **kwargs).square().mean()
    return loss


def saved_tensors_hooks(training: Any) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        training.optimizer, optimizer = None, training.optimizer  # weights stay, for the step behind
        try:
            one_step(training)
        finally:
            training.optimizer = optimizer


def gradient_of_some(training: Any) -> None:
    torch.autograd.grad(_loss(training), [training.chunks[0].decoder.layers[0].mlp.linear_fc1.weight])


def backward_twice(training: Any) -> None:
    loss = _loss(training)
    loss.backward(retain_graph=True)
    loss.backward()


def second_derivative(training: Any) -> None:
    _loss(training).backward(create_graph=True)
