"""The pipeline window: receiving a gradient.

Replaces              `_p2p_ops` and `_batched_p2p_ops` of `megatron.core.pipeline_parallel.p2p_communication`.
Why                   while the next stage's gradient is on its way the stage idles; its first frames can be replayed there.
                      Where the plan keeps copies to the host away from messages, they are let through before.
Calls the original    once per call, with the keywords as they came.
Holds                 nothing.
Passes through when   the exchange receives nothing from the next stage, or no micro-batch is in flight. NCCL's batch returns one
                      Work, gloo one per operation: what is received is told by the keyword, never by position. With
                      `overlap_p2p_comm` works are waited for later, sends after other passes: there only the receive is a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, *, waited_for_later: bool) -> Iterator[Claim]:
    """`waited_for_later`: the schedule is interleaved, and overlaps its exchanges with passes."""
    from megatron.core.pipeline_parallel import p2p_communication

    def hooked(original: Any) -> Any:
        @wraps(original)
        def exchange(**kwargs: Any) -> Any:
            engine.exchange_begins()
            works = original(**kwargs)
            if kwargs.get("tensor_recv_next") is None:
                return works
            if isinstance(works, dict):
                held = [name for name in works if name == "recv_next" or not waited_for_later]
                return {**works, **dict(zip(held, engine.receive([works[name] for name in held]), strict=True))}
            return engine.receive(list(works))

        return exchange

    for name in ("_p2p_ops", "_batched_p2p_ops"):
        yield Claim(p2p_communication, name, hooked, "receives a gradient from the next stage")
