"""What a half holds, and when, if its replay runs in a seat's windows.

windows of       stage's forward, receive    ...  attention(3)        mlp(2): the half before    attention(2): the half itself
                                                  [A]       [B]       [A]       [B]              [A]
what is made     early ............................................................. until the half's own backward is over
in them is               ahead4              ahead4    ahead3    ahead2    ahead               whole
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, WindowAddress, window_at
from megatron_lynx.cost.memory import AHEAD, HalfMemory
from megatron_lynx.cost.section import Stop
from megatron_lynx.solver.placement import Placement, is_early


def held_in(
    memory: HalfMemory,
    section: Section,
    placement: Placement,
    gather: str | None,
    stops: Mapping[str, Stop],
    last: tuple[tuple[Half, int], ...],
) -> HalfMemory:
    """What is held where it is replayed there. `memory`: on demand. `gather`: behind which window its input is gathered. `last`:
    of each half, the number of its last window in a backward."""
    steps: list[tuple[str, int]] = []
    if gather is not None and gather != ON_DEMAND:
        steps.append((gather, stops[section.column_parallel].bytes))
    for portion in placement:
        steps.append((portion.window, memory.regenerated if portion.until is None else stops[portion.until].bytes))
    early, there = 0, dict.fromkeys(AHEAD, 0)
    for window, size in steps:
        if is_early(window):
            early = size
            continue
        for moment in AHEAD[: moments_ahead(window, section.half, last)]:
            there[moment] = size
    return replace(memory, early=early, **{moment: max(0, size - early) for moment, size in there.items()})


@lru_cache(maxsize=256)
def moments_ahead(window: str, half: Half, last: tuple[tuple[Half, int], ...]) -> int:
    """How many moments before a half's own backward begins a window of an earlier backward is: 0 for its own."""
    at = window_at(window, 0)
    assert isinstance(at, WindowAddress), f"{window} is no collective"
    count = 2 * at.layer + HALVES.index(at.half) - HALVES.index(half)
    return 2 * count - (at.ordinal == dict(last)[at.half]) if count else 0
