"""Which part of the replays lay behind a collective, from when each of them began and ended on the device's clock.

collective   ├────────────────────┤
replay           ├──────┤                 all of it behind the collective
replay                          ├──────┤  a part of it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.runtime.trace import Span

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
    merged = _merged(collectives)
    behind = sum(max(0.0, min(end, over) - max(begin, start)) for begin, end in replays for start, over in merged)
    return behind / whole if whole else 0.0


def _merged(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time, with no moment twice."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged
