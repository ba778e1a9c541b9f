"""Which part of the recomputations lay behind a collective, from when each of them began and ended on the device's clock.

collective   ├────────────────────┤
recomputation       ├──────┤                 all of it behind the collective
recomputation                      ├──────┤  a part of it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.timeline import Span

Interval = tuple[float, float]
"""Beginning and end, in seconds."""

ENOUGH = 0.5
"""The share of the recomputations' seconds that must lie behind collectives which take longer than they."""


def recomputations_behind_collectives(spans: Iterable[Span]) -> list[Interval]:
    """The recomputations that a plan puts behind a collective of the tensor-parallel group."""
    recomputations = [span for span in spans if span.kind == "recompute" and span.window not in (None, ON_DEMAND)]
    return [(span.start_s, span.end_s) for span in recomputations if not str(span.window).startswith(RECV_BACKWARD)]


def hidden_share(recomputations: Sequence[Interval], collectives: Sequence[Interval]) -> float:
    """The share of the recomputations' seconds during which a collective was under way."""
    whole = sum(end - begin for begin, end in recomputations)
    under_way = merged(collectives)
    behind = sum(max(0.0, min(end, over) - max(begin, start)) for begin, end in recomputations for start, over in under_way)
    return behind / whole if whole else 0.0


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, with no moment twice."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found
