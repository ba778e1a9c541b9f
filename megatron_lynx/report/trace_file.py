"""Reads a trace for Perfetto back into a timeline: one that a run wrote (`--lynx-trace`), `compare`, or `simulate --trace`.

{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}   ─> what the row is: a rank, or a simulated stage
{"ph": "X", "cat": "replay", "pid": 0, "ts": 12.5, "dur": 3.0, "args": ...}  ─> a span, microseconds
{"ph": "C", "pid": 0, "ts": 12.5, "args": {"held": 1024}}                    ─> what is held from then on
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.simulator.timeline import MemoryCurve, Span, SpanKind, Timeline

MICRO = 1e6
TODO = "give the file that --lynx-trace, compare or simulate --trace wrote; if it broke off, trace a step again"
MOST_PROBLEMS = 5


@dataclass(frozen=True)
class ReadTrace:
    """A timeline from a file. `simulated`: its rows are stages, not ranks."""

    timeline: Timeline
    memory: Mapping[int, MemoryCurve]
    simulated: bool


def read_trace(data: Mapping[str, Any], where: str) -> ReadTrace:
    """Raises ConfigError with the events that cannot be read."""
    events = data["traceEvents"]
    if not isinstance(events, list):
        raise _unreadable(where, [Problem(f"{where}: traceEvents", type(events).__name__, "a list of events", TODO)])
    rows: defaultdict[int, list[Span]] = defaultdict(list)
    held: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    names, problems = set(), []
    for number, event in enumerate(events):
        try:
            kind = event["ph"]
            if kind == "X":
                rows[int(event["pid"])].append(_span(event))
            elif kind == "C":
                held[int(event["pid"])].append((float(event["ts"]) / MICRO, int(event["args"]["held"])))
            elif event["name"] == "process_name":
                names.add(str(event["args"]["name"]).partition(" ")[0])
        except (KeyError, TypeError, ValueError) as error:
            problems.append(Problem(f"{where}: traceEvents.{number}", f"{_cut(event)} ({error!r})", "an event of a trace", TODO))
            if len(problems) == MOST_PROBLEMS:
                break
    if problems:
        raise _unreadable(where, problems)
    if not rows:
        raise _unreadable(where, [Problem(where, "no event with a duration", "a traced step", TODO)])
    timeline = Timeline({row: _in_order(rows[row]) for row in sorted(rows)})
    return ReadTrace(timeline, {row: _curve(points) for row, points in held.items()}, names == {"stage"})


def _span(event: Mapping[str, Any]) -> Span:
    start_s, seconds = float(event["ts"]) / MICRO, float(event["dur"]) / MICRO
    if not (isfinite(start_s) and isfinite(seconds) and seconds >= 0):
        raise ValueError(f"it begins at {event['ts']} and lasts {event['dur']}")
    about = event.get("args", {})
    layer, half, micro_batch, window = (about.get(key) for key in ("layer", "half", "micro_batch", "window"))
    kind = cast(SpanKind, str(event["cat"]))  # a later release may have more kinds
    return Span(kind, start_s, start_s + seconds, layer, half, micro_batch, window, str(event["name"]))


def _in_order(spans: list[Span]) -> tuple[Span, ...]:
    return tuple(sorted(spans, key=lambda span: (span.start_s, -span.end_s)))


def _curve(points: list[tuple[float, int]]) -> MemoryCurve:
    return MemoryCurve(tuple(time_s for time_s, _ in points), tuple(held for _, held in points))


def _cut(event: object) -> str:
    text = repr(event)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _unreadable(where: str, problems: list[Problem]) -> ConfigError:
    return ConfigError(f"{where} is no trace that can be drawn", problems)
