"""What a half holds, and when, if its replay runs in a seat's windows.

windows of       stage's forward, receive    ...  attention(3)        mlp(2): the half before    attention(2): the half itself
                                                  [A]       [B]       [A]       [B]              [A]
what is made     early ............................................................. until the half's own backward is over
in them is               ahead[3]            ahead[3]  ahead[2]  ahead[1]  ahead[0]            whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from megatron_lynx.anatomy import ATTENTION, EXPERTS, HALVES, MLP, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, WindowAddress, window_at
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import Stop
from megatron_lynx.solver.placement import Placement, is_early


def held_in(
    memory: HalfMemory,
    half: Half,
    placement: Placement,
    gather: str | None,
    stops: Mapping[str, Stop],
    *,
    sequence_parallel: bool,
    exchanging: bool = False,
    attention: Section = ATTENTION,
) -> HalfMemory:
    """What is held where it is replayed there. `memory`: on demand. `gather`: behind which window its input is gathered.
    `exchanging`: whether the windows of the half before are exchanges of tokens. `attention`: what fills attention halves."""
    sections = {attention.half: attention, MLP.half: MLP}
    steps: list[tuple[str, int]] = []
    if gather is not None and gather != ON_DEMAND:
        steps.append((gather, stops[sections[half].column_parallel].bytes))
    for portion in placement:
        steps.append((portion.window, memory.regenerated if portion.until is None else stops[portion.until].bytes))
    early, there = 0, [0] * len(memory.ahead)
    for window, size in steps:
        if is_early(window):
            early = size
            continue
        ahead = moments_ahead(window, half, sequence_parallel=sequence_parallel, exchanging=exchanging, attention=attention)
        there[:ahead] = [size] * min(ahead, len(there))
    first, second, third, fourth = (max(0, size - early) for size in there)
    return replace(memory, early=early, ahead=(first, second, third, fourth))


@lru_cache(maxsize=256)
def moments_ahead(
    window: str, half: Half, *, sequence_parallel: bool, exchanging: bool = False, attention: Section = ATTENTION
) -> int:
    """How many moments before a half's own backward begins a window of an earlier backward is: 0 for its own."""
    at = window_at(window, 0)
    assert isinstance(at, WindowAddress), f"{window} is no collective"
    count = 2 * at.layer + HALVES.index(at.half) - HALVES.index(half)
    exchanges = EXPERTS.exchanges_of["bwd"] if exchanging and at.half == EXPERTS.half else None
    section = attention if at.half == attention.half else MLP
    last = len(section.collectives("bwd", sequence_parallel) if exchanges is None else exchanges) - 1
    return 2 * count - (at.ordinal == last) if count else 0
