"""A timeline as a Chrome trace, for ui.perfetto.dev: one process per rank, one thread per lane, microseconds.

{"traceEvents": [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}, ...
                 {"ph": "X", "name": "replay mlp(3)", "pid": 0, "tid": 1, "ts": 12.5, "dur": 3.0, "args": {...}}, ...]}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lynx.timeline import MemoryCurve, Span, Timeline
from megatron_lynx.whole_file import write_whole

THREADS = {"compute": 0, "replay": 1, "communication": 2, "gather": 3, "offload": 4, "reload": 5, "weight_gradient": 6}
COLOURS = {"forward": "thread_state_running", "backward": "thread_state_runnable", "window": "grey", "recv": "grey"}
"""Names of the trace viewer's palette."""


def trace_events(
    timeline: Timeline, row_name: str = "rank", memory: Mapping[int, MemoryCurve] | None = None
) -> list[dict[str, Any]]:
    """Names of processes and threads first, then all spans by start, then counters of bytes held. `row_name`: what a row is."""
    named = [event for rank in timeline.ranks for event in _names(rank, row_name)]
    counters = [event for rank, curve in (memory or {}).items() for event in _counters(rank, curve)]
    spans = [_event(rank, span) for rank, spans in timeline.ranks.items() for span in spans]
    return [*named, *sorted(spans, key=lambda event: (event["ts"], -event["dur"])), *counters]


def write_trace(
    timeline: Timeline, path: str | os.PathLike[str], row_name: str = "rank", memory: Mapping[int, MemoryCurve] | None = None
) -> None:
    """Raises ConfigError where the file cannot be written."""
    events = trace_events(timeline, row_name, memory)
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def thread_of(span: Span) -> str:
    """Replays, gathers, copies and deferred weight gradients have threads of their own: on one thread a trace viewer wants spans
    to nest, these may not."""
    if span.kind in ("forward", "backward"):
        return "compute"
    return span.kind if span.kind in THREADS else "communication"


def _names(rank: int, row_name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"{row_name} {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for name, number in THREADS.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _counters(rank: int, curve: MemoryCurve) -> Iterator[dict[str, Any]]:
    for time_s, held in zip(curve.times_s, curve.bytes, strict=True):
        yield {"ph": "C", "name": "activation bytes", "pid": rank, "ts": time_s * 1e6, "args": {"held": held}}


def _event(rank: int, span: Span) -> dict[str, Any]:
    colour = COLOURS.get(span.kind)
    for wanted, applies in (("good", span.hidden), ("terrible", span.on_demand), ("vsync_highlight_color", span.filling)):
        colour = wanted if applies else colour
    known = {"layer": span.layer, "half": span.half, "micro_batch": span.micro_batch, "window": span.window}
    return {
        "ph": "X",
        "cat": span.kind,
        "name": span.name,
        "pid": rank,
        "tid": THREADS[thread_of(span)],
        "ts": span.start_s * 1e6,
        "dur": span.seconds * 1e6,
        **({"cname": colour} if colour else {}),
        "args": {key: value for key, value in known.items() if value is not None},
    }
