"""Counts the rows of this rank's experts.

Replaces              `forward` on each layer's experts, `mlp.experts` (an instance attribute, whatever their kind).
Why                   a plan assumes a load; a rank with more rows needs more memory and time, which the run reports. A half
                      that may fall back decides by this count.
Calls the original    once per call, with the arguments as they came.
Holds                 a rank's rows under balanced routing.
Passes through when   gradients are off. Only shapes are read, so that nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module

from megatron_lynx.apply.hook import Claim
from megatron_lynx.apply.live_run import module_at
from megatron_lynx.kinds.experts.section import MIXTURE
from megatron_lynx.runtime.engine import Engine


def balanced_rows(tokens: int, per_token: int) -> int:
    """Rows of each rank's experts under balanced routing. `tokens`: of a micro-batch on each rank, before the dispatch;
    `per_token`:
    experts per token (top k).
    """
    from megatron.core.parallel_state import get_expert_tensor_parallel_world_size

    return tokens * per_token * int(get_expert_tensor_parallel_world_size())


def claims(engine: Engine, layers: Iterable[tuple[int, Module]], balanced: int) -> Iterator[Claim]:
    """`layers`: those with experts, by number. `balanced`: see `balanced_rows`."""

    def counting(original: Any) -> Any:
        def forward(permuted_local_hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                engine.experts_got(permuted_local_hidden_states.shape[0], balanced)
            return original(permuted_local_hidden_states, *args, **kwargs)

        return forward

    for number, layer in layers:
        experts = module_at(layer, f"{MIXTURE}.experts")
        yield Claim(experts, "forward", counting, "counts the rows of experts", f"layer {number}.{MIXTURE}.experts")
