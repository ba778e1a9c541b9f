"""The order of micro-batches, and their messages.

Replaces              `forward_step` and `backward_step` of `megatron.core.pipeline_parallel.schedules` (globals of the module,
                      read at each call by every schedule). With overlapped exchanges of experts also
                      `combined_forward_backward_step` of `combined_1f1b`, which interleaves one micro-batch's forward with
                      another one's backward, or runs one of them.
Why                   the order of these calls says which micro-batch runs, and whose backward comes next in which phase.
Calls the original    once per call, with the arguments as they came (`backward_step` lost parameters in 0.17).
Holds                 nothing; the engine refers weakly to the output tensors of micro-batches in flight.
Passes through when   gradients are off, or the pass is another model's (a critic's, say), which may have its own plan.

Receiving a gradient, and sending one, are windows:

Replaces              `_p2p_ops` and `_batched_p2p_ops` of `megatron.core.pipeline_parallel.p2p_communication`.
Why                   the stage idles while it waits for the next stage's gradient; its first frames can be recomputed there.
                      Once its own gradient is in flight, weight gradients run that the stage before need not wait for.
                      NCCL runs all messages of two ranks in a group on one stream. With one hardware queue a recomputation
                      after the send of a forward would wait for the pending receive. So if a forward comes between
                      (`gradients_apart`), gradients use the group of all ranks or, between two stages, one group for each
                      direction.
Calls the original    once per call, with the keywords as they came. With gradients apart once for outputs, and once for
                      gradients unless there are two stages, whose gradients are posted here.
Holds                 nothing.
Passes through when   the exchange receives nothing from the next stage, or no micro-batch is in flight. NCCL's batch returns
                      one Work, gloo one per operation: the receive is recognised by keyword, never by position. With
                      `overlap_p2p_comm` sends are waited for after other passes: there only the receive is a window. It is
                      returned first, because cool-down waits in the order of return, and of two stages the other one receives
                      only after it has sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron_lynx.apply.hook import Claim, instead
from megatron_lynx.apply.live_run import unwrapped
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, chunks: Container[int], *, combined: bool = False) -> Iterator[Claim]:
    """`chunks`: the ids of the plan's models. `combined`: whether forwards and backwards are interleaved."""
    from megatron.core.pipeline_parallel import schedules

    signature = inspect.signature(schedules.forward_step)

    def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if not _is_in(given["model"], chunks):
            return original(*args, **kwargs)
        chunk = given.get("vp_stage") or 0
        with engine.forward_pass(given["current_microbatch"], chunk, given["num_microbatches"]) as ended_with:
            result = original(*args, **kwargs)
            ended_with(result)
        return result

    def backward(original: Any, input_tensor: Any, output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not engine.ledger.expects_backward:
            return original(input_tensor, output_tensor, *args, **kwargs)
        with engine.backward_pass(output_tensor) as returns:
            gradient = original(input_tensor, output_tensor, *args, **kwargs)
            returns(gradient)
        return gradient

    yield Claim(schedules, "forward_step", instead(forward), "begins and ends a micro-batch's forward")
    yield Claim(schedules, "backward_step", instead(backward), "begins and ends a micro-batch's backward")
    if combined:
        yield _combined_claim(engine, chunks)


def _is_in(model: Any, chunks: Container[int]) -> bool:
    return model is not None and id(unwrapped(model)[1]) in chunks


def _combined_claim(engine: Engine, chunks: Container[int]) -> Claim:
    from megatron.core.pipeline_parallel import combined_1f1b

    signature = inspect.signature(combined_1f1b.combined_forward_backward_step)

    def combined(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        forward, backward = (_is_in(given[name], chunks) for name in ("f_model", "b_model"))
        with ExitStack() as stack:
            if backward:
                stack.enter_context(engine.backward_pass(given["b_output_tensor"]))
            if forward:
                place = given["current_microbatch"], given.get("f_model_chunk_id") or 0, given["num_microbatches"]
                ended_with = stack.enter_context(engine.forward_pass(*place))
            result = original(*args, **kwargs)
            if forward:
                ended_with(result)
        return result

    reason = "runs a forward and a backward in turns"
    return Claim(combined_1f1b, "combined_forward_backward_step", instead(combined), reason)


def receive_claims(engine: Engine, *, waited_for_later: bool, gradients_apart: bool) -> Iterator[Claim]:
    """All ranks must pass the same. `waited_for_later`: the schedule is interleaved, and overlaps its exchanges with passes.
    `gradients_apart`: and a recomputation may run between the send of a forward and a gradient."""
    from megatron.core.pipeline_parallel import p2p_communication

    def exchange(original: Any, **kwargs: Any) -> Any:
        with engine.aborting():
            engine.offloader.exchange_begins()
        works = original(**kwargs)
        if kwargs.get("tensor_send_prev") is not None:
            engine.gradient_sent()
        if kwargs.get("tensor_recv_next") is None:
            return works
        if isinstance(works, dict):
            held = ["recv_next"] if waited_for_later else [*works]
            windows = dict(zip(held, engine.receive([works[name] for name in held]), strict=True))
            return windows | {name: work for name, work in works.items() if name not in windows}
        return engine.receive(list(works))

    def exchange_apart(original: Any, **kwargs: Any) -> Any:
        return exchange(partial(_apart, original), **kwargs)

    reason = "receives a gradient from the next stage"
    yield Claim(p2p_communication, "_p2p_ops", instead(exchange_apart if gradients_apart else exchange), reason)
    yield Claim(p2p_communication, "_batched_p2p_ops", instead(exchange), reason)


def _apart(original: Any, **kwargs: Any) -> dict[str, Any]:
    outputs = original(**{**kwargs, "tensor_send_prev": None, "tensor_recv_next": None})
    gradients = {**kwargs, "tensor_send_next": None, "tensor_recv_prev": None}
    if dist.get_backend(kwargs["group"]) == "ucc":  # other groups use NCCL, which UCC was chosen to avoid
        return {**outputs, **original(**gradients)}
    if kwargs["group"].size() == 2:
        return {**outputs, **_of_two_stages(gradients)}
    return {**outputs, **original(**{**gradients, "group": dist.group.WORLD})}  # it has every pair of them


def _of_two_stages(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Exchange gradients between two stages, each direction in another of Megatron's groups that has both ranks."""
    from megatron.core.parallel_state import get_expert_tensor_model_pipeline_parallel_group, get_model_parallel_group

    ways = get_model_parallel_group(), get_expert_tensor_model_pipeline_parallel_group()
    sends, receives = ways if gradients["group"].rank() == 0 else reversed(ways)
    works = {}
    if (sent := gradients["tensor_send_prev"]) is not None:
        works["send_prev"] = dist.isend(sent, gradients["prev_pipeline_rank"], group=sends)
    if (received := gradients["tensor_recv_next"]) is not None:
        works["recv_next"] = dist.irecv(received, gradients["next_pipeline_rank"], group=receives)
    return works
