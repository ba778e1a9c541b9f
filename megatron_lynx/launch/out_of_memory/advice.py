"""The nearest change after which it fits, as a command.

fragmentation alone   segments that grow where they are, but   export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
                      for --use-nccl-ub with an older torch
something lacks       a plan for less memory: what PyTorch     megatron-lynx plan --memory-gib X -o PLAN JOB
                      can have, less what this moment took
                      beyond its prediction
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from megatron_lynx.launch.out_of_memory.allocator import Allocator
from megatron_lynx.torch_release import ALLOCATOR, GROWING
from megatron_lynx.units import GIB

DIGITS = 4
"""Of a budget, rounded down."""


def command(
    allocator: Allocator,
    planned_bytes: int | None,
    plan: str,
    asked: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    may_grow: bool = True,
) -> str:
    """What to paste. `planned_bytes`: of this moment; `asked`: the words with which the plan was asked for; `may_grow`: whether
    segments may be told to."""
    name = next((name for name in ALLOCATOR if name in environment), ALLOCATOR[-1])
    present = environment.get(name, "")
    if not allocator.lacking_bytes and GROWING not in present and may_grow:
        return f"export {name}={','.join(filter(None, [present, GROWING]))}"
    memory_gib = rounded_down(budget_bytes(allocator, planned_bytes) / GIB)
    job = "JOB (JOB: what this plan was made of)" if asked is None else asked
    return f"megatron-lynx plan --memory-gib {memory_gib} -o {plan} {job}"


def budget_bytes(allocator: Allocator, planned_bytes: int | None) -> int:
    """What a plan may need so that what it really takes is there. What is fragmented cannot be used."""
    lost = 0 if allocator.lacking_bytes else allocator.unused_bytes
    beyond = 0 if planned_bytes is None else max(0, allocator.needed_bytes - planned_bytes)
    return max(0, allocator.limit_bytes - lost - beyond)


def rounded_down(gib: float) -> str:
    """With so many significant digits that models of all sizes get a figure, never above what there is."""
    if gib <= 0:
        return "0"
    places = max(0, DIGITS - 1 - math.floor(math.log10(gib)))
    text = f"{math.floor(gib * 10**places) / 10**places:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text
