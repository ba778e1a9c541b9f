"""The pipeline windows: receiving a gradient, and sending one.

Replaces              `_p2p_ops` and `_batched_p2p_ops` of `megatron.core.pipeline_parallel.p2p_communication`.
Why                   the stage idles while it waits for the next stage's gradient; its first frames can be recomputed there.
                      Once its own gradient is in flight, weight gradients run that the stage before need not wait for.
                      If the plan keeps offload copies away from messages, they finish first.
                      NCCL runs all messages of two ranks in a group on one stream. With one hardware queue a recomputation
                      after the send of a forward would wait for the pending receive. So if a forward comes between
                      (`gradients_apart`), gradients have streams of their own: they use the group of all ranks or, between
                      two stages, one group for each direction.
Calls the original    once per call, with the keywords as they came. With gradients apart once for outputs, and once for
                      gradients unless there are two stages, whose gradients are posted here.
Holds                 nothing.
Passes through when   the exchange receives nothing from the next stage, or no micro-batch is in flight. NCCL's batch returns
                      one Work, gloo one per operation: the receive is recognised by keyword, never by position. With
                      `overlap_p2p_comm` works are waited for later, sends after other passes: there only the receive is a
                      window. It is returned first, because cool-down waits in the order of return: with two stages the other
                      one receives only after it has sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, *, waited_for_later: bool, gradients_apart: bool) -> Iterator[Claim]:
    """All ranks must pass the same arguments.

    `waited_for_later`: the schedule is interleaved, and overlaps its exchanges with passes.
    `gradients_apart`: and a recomputation may run between the send of a forward and a gradient.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    def hooked(original: Any, apart: bool = False) -> Any:
        @wraps(original)
        def exchange(**kwargs: Any) -> Any:
            engine.exchange_begins()
            works = _apart(original, kwargs) if apart else original(**kwargs)
            if kwargs.get("tensor_send_prev") is not None:
                engine.gradient_sent()
            if kwargs.get("tensor_recv_next") is None:
                return works
            if isinstance(works, dict):
                held = ["recv_next"] if waited_for_later else [*works]
                windows = dict(zip(held, engine.receive([works[name] for name in held]), strict=True))
                return windows | {name: work for name, work in works.items() if name not in windows}
            return engine.receive(list(works))

        return exchange

    reason = "receives a gradient from the next stage"
    yield Claim(p2p_communication, "_p2p_ops", partial(hooked, apart=gradients_apart), reason)
    yield Claim(p2p_communication, "_batched_p2p_ops", hooked, reason)


def _apart(original: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Send outputs in the given group, gradients in others."""
    outputs = original(**{**kwargs, "tensor_send_prev": None, "tensor_recv_next": None})
    gradients = {**kwargs, "tensor_send_next": None, "tensor_recv_prev": None}
    if dist.get_backend(kwargs["group"]) == "ucc":  # other groups use NCCL, which UCC was chosen to avoid
        return {**outputs, **original(**gradients)}
    if kwargs["group"].size() == 2:
        return {**outputs, **_of_two_stages(**gradients)}
    return {**outputs, **original(**{**gradients, "group": dist.group.WORLD})}  # it has every pair of them


def _of_two_stages(
    *,
    tensor_send_prev: Tensor | None,
    tensor_recv_next: Tensor | None,
    group: Any,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
    **outputs: None,
) -> dict[str, Any]:
    """Exchange gradients between two stages, each direction in another of Megatron's groups that has both ranks."""
    from megatron.core.parallel_state import get_expert_tensor_model_pipeline_parallel_group, get_model_parallel_group

    ways = get_model_parallel_group(), get_expert_tensor_model_pipeline_parallel_group()
    sends, receives = ways if group.rank() == 0 else reversed(ways)
    works = {}
    if tensor_send_prev is not None:
        works["send_prev"] = dist.isend(tensor_send_prev, prev_pipeline_rank, group=sends)
    if tensor_recv_next is not None:
        works["recv_next"] = dist.irecv(tensor_recv_next, next_pipeline_rank, group=receives)
    return works
