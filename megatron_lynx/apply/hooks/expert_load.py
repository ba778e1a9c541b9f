"""How many rows the experts of this rank get.

Replaces              `forward` on each layer's experts, `mlp.experts` (an instance attribute, whatever their kind).
Why                   a plan assumes a load; a rank that gets more rows needs more memory and time, and the run says so. A half
                      that may fall back decides by these.
Calls the original    once per call, with the arguments as they came.
Holds                 how many rows a rank would get if all experts were asked as often.
Passes through when   gradients are off, or a replay runs: its rows were counted in the forward. Only shapes are looked at, so
                      that nothing waits for the device.
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
    """Rows that experts of each rank get if all are asked as often. `tokens`: of a micro-batch, on each rank, before they travel;
    `per_token`: how many experts each of them is for."""
    from megatron.core.parallel_state import get_expert_tensor_parallel_world_size

    return tokens * per_token * int(get_expert_tensor_parallel_world_size())


def claims(engine: Engine, layers: Iterable[tuple[int, Module]], balanced: int) -> Iterator[Claim]:
    """`layers`: those with experts, by number. `balanced`: rows that a rank would get if all experts were asked as often."""

    def counting(original: Any) -> Any:
        def forward(permuted_local_hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                engine.experts_got(permuted_local_hidden_states.shape[0], balanced)
            return original(permuted_local_hidden_states, *args, **kwargs)

        return forward

    for number, layer in layers:
        experts = module_at(layer, f"{MIXTURE}.experts")
        yield Claim(experts, "forward", counting, "counts the rows of experts", f"layer {number}.{MIXTURE}.experts")
