"""Which part of the replays lay behind a collective, from when each of them began and ended on the device's clock.

collective   ├────────────────────┤
replay           ├──────┤                 all of it behind the collective
replay                          ├──────┤  a part of it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.timeline import Span

Interval = tuple[float, float]
"""Beginning and end, in seconds."""

ENOUGH = 0.5
"""The share of the replays' seconds that must lie behind collectives which take longer than they."""


def replays_behind_collectives(spans: Iterable[Span]) -> list[Interval]:
    """The replays that a plan puts behind a collective of the tensor-parallel group."""
    replays = [span for span in spans if span.kind == "replay" and span.window not in (None, ON_DEMAND)]
    return [(span.start_s, span.end_s) for span in replays if not str(span.window).startswith(RECV_BACKWARD)]


def hidden_share(replays: Sequence[Interval], collectives: Sequence[Interval]) -> float:
    """The share of the replays' seconds during which a collective was under way."""
    whole = sum(end - begin for begin, end in replays)
    under_way = merged(collectives)
    behind = sum(max(0.0, min(end, over) - max(begin, start)) for begin, end in replays for start, over in under_way)
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
