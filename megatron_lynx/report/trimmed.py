"""Waits as long as their communication. The simulator draws a wait until the replays in it are over, as a run does:

    wait       ├──────────────┤                 ├──────┤
    replays    ├hidden┤exposed┤      ─>         ├hidden┤exposed┤

Of a run nobody knows when the communication was over, if not last: there a replay in a wait is one bar, and nothing changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from megatron_lynx.report.kinds import is_wait, kind_of
from megatron_lynx.simulator.timeline import Span, Timeline


def trimmed(timeline: Timeline) -> Timeline:
    """The same timeline, every wait ended where the first exposed bar in it begins."""
    return Timeline({row: tuple(_trimmed(spans)) for row, spans in timeline.ranks.items()})


def _trimmed(spans: Sequence[Span]) -> Iterator[Span]:
    exposed = sorted(span.start_s for span in spans if kind_of(span) in ("on_demand", "flushed"))
    for span in spans:
        yield span._replace(end_s=_end_s(span, exposed)) if is_wait(span) else span


def _end_s(wait: Span, exposed: Sequence[float]) -> float:
    place = bisect_left(exposed, wait.start_s)
    return min([wait.end_s, *exposed[place : place + 1]])
