"""Training without flushes in Megatron's training loop.

Replaces              `get_forward_backward_func` in the module of the training loop (`megatron.training.training`), and `step` of
                      its optimizer.
Why                   the loop's order stays: clear gradients, forward and backward, step. The replaced function leaves forwards
                      of the next batch in flight, and the step writes the retired buffer.
Calls the original    `step` once per call; Megatron's own function if it only runs forward.
Holds                 the pipeline.
Passes through when   `forward_only`: an evaluation. It is refused while micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.double_buffered.pipeline import DoubleBuffered
from megatron_lynx.errors import HookRefused, Problem

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
    """Yield the claims (`apply.hook.put_in_place`) for a run that has not begun.

    Args:
        loop: the module whose global `get_forward_backward_func` the training loop calls.
        drains: called before each batch: whether the pipeline must be empty after it, to evaluate or save weights or to end.
            Must be equal on all ranks.
    """

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
