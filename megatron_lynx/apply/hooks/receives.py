"""The pipeline window: receiving a gradient.

Replaces              `_p2p_ops` and `_batched_p2p_ops` of `megatron.core.pipeline_parallel.p2p_communication`.
Why                   while the next stage's gradient is on its way the stage idles; its first frames can be replayed there.
                      Where the plan keeps copies to the host away from messages, they are let through before.
                      With NCCL all messages of two ranks in a group are in one stream. With one hardware queue a replay behind
                      the send of a forward would come behind the pending receive of a gradient, and hide nothing. So where a
                      forward comes between (`gradients_apart`), gradients go through the group of all ranks, in another stream.
Calls the original    once per call, with the keywords as they came; once for outputs and once for gradients if these are apart.
Holds                 nothing.
Passes through when   the exchange receives nothing from the next stage, or no micro-batch is in flight. NCCL's batch returns one
                      Work, gloo one per operation: what is received is told by the keyword, never by position. With
                      `overlap_p2p_comm` works are waited for later, sends after other passes: there only the receive is a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial, wraps
from typing import Any

import torch.distributed as dist

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, *, waited_for_later: bool, gradients_apart: bool) -> Iterator[Claim]:
    """What all ranks put in place, with the same answers.

    `waited_for_later`: the schedule is interleaved, and overlaps its exchanges with passes.
    `gradients_apart`: and replays run between the send of a forward and a gradient; there are three stages or more.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    def hooked(original: Any, apart: bool = False) -> Any:
        @wraps(original)
        def exchange(**kwargs: Any) -> Any:
            engine.exchange_begins()
            works = _apart(original, kwargs) if apart else original(**kwargs)
            if kwargs.get("tensor_recv_next") is None:
                return works
            if isinstance(works, dict):
                held = [name for name in works if name == "recv_next" or not waited_for_later]
                return {**works, **dict(zip(held, engine.receive([works[name] for name in held]), strict=True))}
            return engine.receive(list(works))

        return exchange

    reason = "receives a gradient from the next stage"
    yield Claim(p2p_communication, "_p2p_ops", partial(hooked, apart=gradients_apart), reason)
    yield Claim(p2p_communication, "_batched_p2p_ops", hooked, reason)


def _apart(original: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Outputs in the group that was given, gradients in the group of all ranks, which knows every pair of them."""
    outputs = original(**{**kwargs, "tensor_send_prev": None, "tensor_recv_next": None})
    group = kwargs["group"] if dist.get_backend(kwargs["group"]) == "ucc" else dist.group.WORLD  # all ranks have NCCL's messages
    gradients = original(**{**kwargs, "tensor_send_next": None, "tensor_recv_prev": None, "group": group})
    return {**outputs, **gradients}
