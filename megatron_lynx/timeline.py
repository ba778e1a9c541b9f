"""Spans of a real or simulated step on every rank, and their trace for Perfetto.

    rank 0   forward  attention(1) ─┬─ mlp(1) ─┬─ ...  backward  mlp(1) ─┬─ ...
             window                 └ fwd.attention.0@1                  └ bwd.mlp.0@1
             recompute                                                     └ mlp(1), inside that window, or on demand

A window spans the wait for its communication, from `wait()` to its return: recomputations inside it, then the rest. Spans of one
kind may lie inside those of another.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.whole_file import write_whole

ComputeKind = Literal["forward", "backward", "recompute", "weight_gradient", "update"]
WaitKind = Literal["window", "gather", "recv", "offload", "reload", "copy_wait"]
SpanKind = Literal[ComputeKind, WaitKind]

FLUSHED = "flushed"
"""`window` of an exposed weight gradient."""


def seconds_between(begin: Any, end: Any) -> float:
    """Return the seconds between two timed events on the device's clock, which a `torch.cuda.Event` states in milliseconds."""
    return float(begin.elapsed_time(end)) / 1e3


@dataclass(frozen=True)
class Passes:
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def __sub__(self, other: Passes) -> Passes:
        return self + other * -1

    def __mul__(self, by: Passes | float) -> Passes:
        factors = by if isinstance(by, Passes) else Passes(by, by)
        return Passes(factors.forward_s * self.forward_s, factors.backward_s * self.backward_s)

    def at_least(self, other: Passes) -> Passes:
        return Passes(max(self.forward_s, other.forward_s), max(self.backward_s, other.backward_s))

    def beyond(self, forward_s: float, backward_s: float) -> float:
        """Return how much longer than these the two are, each by itself."""
        return max(0.0, self.forward_s - forward_s) + max(0.0, self.backward_s - backward_s)


class Span(NamedTuple):
    """`window`: that of a recomputation, or the window itself."""

    kind: SpanKind
    start_s: float
    end_s: float
    layer: int | None = None
    half: str | None = None
    micro_batch: int | None = None
    window: str | None = None
    name: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def on_demand(self) -> bool:
        return self.kind == "recompute" and self.window in (None, ON_DEMAND)


@dataclass(frozen=True)
class Timeline:
    """Spans by rank. Time 0 is the beginning of the first span of any rank."""

    ranks: Mapping[int, tuple[Span, ...]]

    @property
    def seconds(self) -> float:
        return max((span.end_s for spans in self.ranks.values() for span in spans), default=0.0)


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes from each time until the next."""

    times_s: tuple[float, ...]
    bytes: tuple[int, ...]

    @cached_property
    def peak_bytes(self) -> int:
        return max(self.bytes, default=0)


def curve_of_parts(parts: Sequence[tuple[float, tuple[tuple[float, int], ...]]]) -> MemoryCurve:
    """The curve of many parts, such as passes: their beginnings, and their changes from then on, (seconds, bytes allocated or
    freed). Most parts are one of few. It begins with 0 bytes at time 0.

    Changes at the same time are applied in order, so that a peak of no duration is seen.
    """
    apart = {id(changes): changes for _, changes in parts if changes}
    known = {number: tuple(map(np.array, zip(*changes, strict=True))) for number, changes in apart.items()}
    placed = [(begin_s + times_s, sizes) for begin_s, changes in parts if changes for times_s, sizes in [known[id(changes)]]]
    if not placed:
        return MemoryCurve((0.0,), (0,))
    times_s, sizes = (np.concatenate(arrays) for arrays in zip(*placed, strict=True))
    order = np.argsort(times_s, kind="stable")
    return MemoryCurve((0.0, *times_s[order].tolist()), (0, *np.cumsum(sizes[order]).tolist()))


def timeline_of(spans: Mapping[int, Iterable[Span]]) -> Timeline:
    """A timeline from each rank's spans. Ranks' clocks must agree: start their traces right after a barrier."""
    ranks = {rank: tuple(spans[rank]) for rank in sorted(spans)}
    origin_s = min((span.start_s for rank_spans in ranks.values() for span in rank_spans), default=0.0)

    def shifted(span: Span) -> Span:
        return span._replace(start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)

    return Timeline({rank: tuple(nested(map(shifted, rank_spans))) for rank, rank_spans in ranks.items()})


def nested(spans: Iterable[Span]) -> list[Span]:
    """In order of their beginnings, a span before those inside it."""
    return sorted(spans, key=lambda span: (span.start_s, -span.end_s))


def name_of(kind: str, layer: int | None, half: str | None, window: str | None) -> str:
    """`recompute mlp(3)`, `window bwd.mlp.0@3`, `copy_wait`."""
    if half:
        return f"{kind} {half}({layer})"
    return f"{kind} {window}" if window else kind


THREADS = {"compute": 0, "recompute": 1, "communication": 2, "gather": 3, "offload": 4, "reload": 5, "weight_gradient": 6}
"""Spans of one thread must nest in a trace viewer; recomputations, gathers, copies and weight gradients overlap others."""


def write_trace(
    timeline: Timeline, path: str | os.PathLike[str], row_name: str = "rank", memory: Mapping[int, MemoryCurve] | None = None
) -> None:
    """Write a Chrome trace, in microseconds, for ui.perfetto.dev. Raises `ConfigError` if the file cannot be written."""
    names = [event for rank in timeline.ranks for event in _names(rank, row_name)]
    spans = [_event(rank, span) for rank, spans in timeline.ranks.items() for span in spans]
    counters = [
        {"ph": "C", "name": "activation bytes", "pid": rank, "ts": time_s * 1e6, "args": {"held": held}}
        for rank, curve in (memory or {}).items()
        for time_s, held in zip(curve.times_s, curve.bytes, strict=True)
    ]
    events = [*names, *sorted(spans, key=lambda event: (event["ts"], -event["dur"])), *counters]
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _names(rank: int, row_name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"{row_name} {rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for name, number in THREADS.items():
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _event(rank: int, span: Span) -> dict[str, Any]:
    thread = "compute" if span.kind in ("forward", "backward") else span.kind if span.kind in THREADS else "communication"
    known = {"layer": span.layer, "half": span.half, "micro_batch": span.micro_batch, "window": span.window}
    return {
        "ph": "X",
        "cat": span.kind,
        "name": span.name,
        "pid": rank,
        "tid": THREADS[thread],
        "ts": span.start_s * 1e6,
        "dur": span.seconds * 1e6,
        "args": {key: value for key, value in known.items() if value is not None},
    }
