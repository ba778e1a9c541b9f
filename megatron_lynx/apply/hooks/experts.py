"""Windows in exchanges of experts' tokens, and the rows of this rank's experts.

Replaces              `torch.distributed.all_to_all_single`, which Megatron's alltoall dispatcher calls in both passes; `dispatch`
                      and `combine` of `deep_ep.Buffer`, which its flex dispatcher calls; `forward` on each layer's experts,
                      `mlp.experts` (an instance attribute, whatever their kind).
Why                   compute waits for tokens, or for the event of DeepEP's own stream. A plan assumes a load; a rank with more
                      rows needs more memory and time, which the run reports, and by which a half may fall back.
Calls the original    once per call; all-to-all in a window asynchronously, then waits if the call was synchronous.
Holds                 the group; a rank's rows under balanced routing.
Passes through when   the window has no task, the group is another one, the call is outside of a half and its backward; for DeepEP
                      if no event is requested; for experts if gradients are off. Only shapes are read, so that nothing waits for
                      the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.hooks.collectives import issued
from megatron_lynx.apply.live_run import LiveRun, module_at
from megatron_lynx.kinds.experts.section import MIXTURE
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.engine import Engine


def exchange_claims(engine: Engine, group: Any) -> Iterator[Claim]:
    def in_window(original: Any) -> Any:
        @wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            window = engine.waits.window(exchange=True) if kwargs.get("group") is group and engine.in_half else None
            return issued(window, original, *args, **kwargs)

        return exchange

    yield Claim(torch.distributed, "all_to_all_single", in_window, "brings tokens to experts, and back")


class WindowedEvent:
    """An event of a buffer's stream whose wait is a window; otherwise it behaves like the event."""

    def __init__(self, event: Any, window: Callable[[Any], Any]) -> None:
        self._event = event
        self._work = window(self)

    def current_stream_wait(self) -> Any:
        return self._work.wait()

    def wait(self) -> Any:
        """Wait for the event itself, as its `Work` does."""
        return self._event.current_stream_wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def deepep_claims(engine: Engine) -> Iterator[Claim]:
    from megatron.core.transformer.moe import fused_a2a

    def in_window(original: Any) -> Any:
        @wraps(original)
        def exchange(*args: Any, **kwargs: Any) -> Any:
            window = engine.waits.window(exchange=True) if kwargs.get("async_finish") and engine.in_half else None
            outputs = original(*args, **kwargs)
            return outputs if window is None else (*outputs[:-1], WindowedEvent(outputs[-1], window))

        return exchange

    for method in ("dispatch", "combine"):
        yield Claim(fused_a2a.Buffer, method, in_window, "brings tokens to experts, and back")


def load_claims(engine: Engine, plan: Plan, run: LiveRun, layers: Mapping[int, Module]) -> Iterator[Claim]:
    from megatron.core.parallel_state import get_expert_tensor_parallel_world_size

    tokens = plan.model.seq // run.shards_of(plan.parallel.sequence_parallel) * plan.batch.micro
    balanced = tokens * run.config.moe_router_topk * int(get_expert_tensor_parallel_world_size())

    def counting(original: Any) -> Any:
        def forward(permuted_local_hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                engine.experts_got(permuted_local_hidden_states.shape[0], balanced)
            return original(permuted_local_hidden_states, *args, **kwargs)

        return forward

    for number, layer in layers.items():
        experts = module_at(layer, f"{MIXTURE}.experts")
        yield Claim(experts, "forward", counting, "counts the rows of experts", f"layer {number}.{MIXTURE}.experts")
