"""How many rows the experts of every rank will get, before any of them travels.

Replaces              `gather_from_sequence_parallel_region` as Megatron's token dispatchers look it up (their module's global).
Why                   the all-to-all dispatcher gathers, from all ranks that share out a layer's experts, how many tokens each
                      expert gets. A half that may fall back decides by these, so that all ranks decide alike, without a
                      collective of its own.
Calls the original    once per call, with the arguments as they came.
Holds                 how many experts and ranks there are, and how many rows a rank would get if all experts were asked as often.
Passes through when   what is gathered are no counts of experts, or no half is recorded. Installed only where a stage of the plan
                      says what load its bytes hold for (`experts_hold`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import wraps
from typing import Any

import torch

from megatron_lynx.apply.hook import Claim
from megatron_lynx.runtime.engine import Engine


def claims(engine: Engine, experts: int, ranks: int, balanced: float) -> Iterator[Claim]:
    """`experts`: of a layer, shared out over so many `ranks`, each of which would get `balanced` rows."""
    from megatron.core.transformer.moe import token_dispatcher

    def counting(original: Any) -> Any:
        @wraps(original)
        def gather(input_: Any, *args: Any, **kwargs: Any) -> Any:
            gathered = original(input_, *args, **kwargs)
            if input_.dim() == 1 and input_.dtype == torch.int64 and torch.is_grad_enabled():
                engine.rows_asked(gathered.view(-1, ranks, experts // ranks).sum(dim=(0, 2)), balanced)
            return gathered

        return gather

    yield Claim(token_dispatcher, "gather_from_sequence_parallel_region", counting, "gathers how many tokens each expert gets")
