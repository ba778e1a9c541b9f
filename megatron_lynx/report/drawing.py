"""Draws as SVG: a step by stage over time, a part of it bar by bar, devices against the budget, and plans over budgets.

stage 0  ▒▒▓▓ ▒▒▓▓   compute: passes, recomputations, waits
         ── ── ─ ─   communication, copies
         ▁▂▃▃▂▁      bytes of the layers

Colours are classes of `kinds.json`, with Okabe and Ito's hues. A later kind is drawn over an earlier one. The predicted step is a
simulation or a file of `simulate`, the measured one the trace of a run. In spans, a wait lasts until its work is complete; in a
view it ends where exposed work begins:

    wait             ├──────────────┤                 ├──────┤
    recomputations   ├hidden┤exposed┤      ─>         ├hidden┤exposed┤
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby, pairwise
from math import floor, log10
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.plan.plan import Plan
from megatron_lynx.report.given import Given, stages_of_rows
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.timeline import FLUSHED, MemoryCurve, Span, Timeline
from megatron_lynx.units import GIB, format_bytes, format_seconds

MOST_ROWS = 32
"""Rows of a view; of more ranks than that, one of each stage is shown."""

EXPOSED = (None, ON_DEMAND, FLUSHED)
"""`Span.window` of exposed work."""


def kind_of(span: Span) -> str:
    kind: str = span.kind
    exposed = span.window in EXPOSED
    if kind == "recompute":
        return "on_demand" if exposed else "hidden"
    if kind == "weight_gradient" and exposed:
        return "flushed"
    if kind == "copy_wait":
        return "wait"
    return "recv" if kind == "window" and (span.window or "").startswith("pipe.") else kind


def is_wait(span: Span) -> bool:
    return span.kind in ("window", "recv")


@dataclass(frozen=True)
class View:
    name: Literal["predicted", "measured"]
    title: str
    passes_s: float
    timeline: Timeline
    stages: Mapping[int, int]
    layers: Mapping[int, str] = field(default_factory=dict)
    memory: Mapping[int, MemoryCurve] = field(default_factory=dict)
    """Bytes of the layers of a row."""
    regenerated: Mapping[int, MemoryCurve] = field(default_factory=dict)
    """Recomputed bytes among them."""

    @property
    def labels(self) -> dict[int, str]:
        return {
            row: f"stage {stage}" + ("" if self.name == "predicted" else f", rank {row}") for row, stage in self.stages.items()
        }


def views_of(given: Given, plan: Plan | None, simulation: Simulation | None) -> list[View]:
    """Return the views, predicted first. Raises `PlanMismatch` for a trace of another job."""
    views = []
    if simulation is not None:
        stages = range(len(simulation.executed))
        memory, regenerated = ({stage: held(stage) for stage in stages} for held in (simulation.memory, simulation.regenerated))
        timeline = trimmed(simulation.timeline())
        named = {stage: stage for stage in stages}
        layers = _layers(named, plan)
        views.append(View("predicted", "simulated", simulation.step_s, timeline, named, layers, memory, regenerated))
    if given.trace is not None and not (given.trace.simulated and views):
        where, timeline = given.sources["trace"], trimmed(given.trace.timeline)
        rows = shown_rows(timeline, stages_of_rows(given.trace, plan, where))
        name: Literal["predicted", "measured"] = "predicted" if given.trace.simulated else "measured"
        views.append(View(name, f"from {where}", timeline.seconds, timeline, rows, _layers(rows, plan), given.trace.memory))
    return views


def _layers(stages: Mapping[int, int], plan: Plan | None) -> dict[int, str]:
    if plan is None:
        return {}
    return {row: ", ".join(str(entry.layers) for entry in plan.chunks_of(stage)) for row, stage in stages.items()}


def shown_rows(timeline: Timeline, stages: Mapping[int, int]) -> dict[int, int]:
    rows = sorted(timeline.ranks, key=lambda row: (stages[row], row))
    if len(rows) > MOST_ROWS:
        ends_s = {row: max((span.end_s for span in timeline.ranks[row]), default=0.0) for row in rows}
        rows = [max(group, key=ends_s.__getitem__) for _, group in groupby(rows, key=stages.__getitem__)]
    return {row: stages[row] for row in rows}


def trimmed(timeline: Timeline) -> Timeline:
    return Timeline({row: tuple(_trimmed(spans)) for row, spans in timeline.ranks.items()})


def _trimmed(spans: Sequence[Span]) -> Iterator[Span]:
    exposed = sorted(span.start_s for span in spans if kind_of(span) in ("on_demand", "flushed"))
    for span in spans:
        place = bisect_left(exposed, span.start_s)
        yield span._replace(end_s=min([span.end_s, *exposed[place : place + 1]])) if is_wait(span) else span


Kinds = dict[str, tuple[str, str, str]]
"""Label, light colour and dark colour by name."""

SPANS, MEMORY = (
    dict[str, tuple[str, str, str]](kinds)
    for kinds in json.loads((Path(__file__).parent / "kinds.json").read_text(encoding="utf-8")).values()
)
LANES = {"communication": ("window", "recv", "gather"), "copies": ("offload", "reload")}
HEIGHTS = {"compute": 30, "communication": 10, "copies": 8, "memory": 34}
PASSES = ("forward", "backward")
GUTTER, COLUMNS = 130, 1250
WIDTH = GUTTER + COLUMNS + 4
FINE = 8
HALVES_SHOWN = 14
Bar = tuple[str, Span]


def bars_of(spans: Sequence[Span]) -> list[Bar]:
    return [bar for span in spans for bar in ((kind_of(span), span), ("wait", span))[: 2 if is_wait(span) else 1]]


def part_of(view: View) -> tuple[float, float] | None:
    rows = [[span.start_s for span in view.timeline.ranks[row] if span.kind in PASSES] for row in view.stages]
    starts_s = max((sorted(row) for row in rows), key=lambda row: len(row), default=[])
    if len(starts_s) <= 3 * HALVES_SHOWN:
        return None
    first = max(0, bisect_left(starts_s, view.timeline.seconds / 2) - HALVES_SHOWN // 2)
    return starts_s[first], starts_s[min(first + HALVES_SHOWN, len(starts_s) - 1)]


def step_drawn(view: View, part: tuple[float, float] | None = None, *, single: bool) -> str:
    begin_s, end_s = part or (0.0, view.timeline.seconds)
    scale = COLUMNS / ((end_s - begin_s) or 1.0)
    rows = {
        row: [bar for bar in bars_of(view.timeline.ranks[row]) if bar[1].end_s > begin_s and bar[1].start_s < end_s]
        for row in view.stages
    }
    used = {kind for bars in rows.values() for kind, _ in bars}
    apart = {*LANES["communication"], *LANES["copies"]}
    lanes = {"compute": used - apart, **{lane: used & {*kinds} for lane, kinds in LANES.items() if used & {*kinds}}}
    most_bytes = 0 if part else max((curve.peak_bytes for curve in view.memory.values()), default=0)
    parts, top = list[str](), 24
    for row, bars in rows.items():
        parts.append(_text(view.labels[row], 0, top + 20, "row"))
        for lane, kinds in lanes.items():
            drawn = sorted((bar for bar in bars if bar[0] in kinds), key=lambda bar: _rank(bar[0]))
            parts += (_bars if single else _shares)(drawn, begin_s, scale, top, HEIGHTS[lane])
            top += HEIGHTS[lane] + 2
        if most_bytes and row in view.memory:
            top += HEIGHTS["memory"] + 2
            for kind, curve in (("kept", view.memory[row]), ("regenerated", view.regenerated.get(row))):
                if curve is not None:
                    parts.append(_area(_held(curve, end_s) * (HEIGHTS["memory"] / most_bytes), top - 2, kind))
            parts.append(_text(format_bytes(view.memory[row].peak_bytes), GUTTER - 6, top - 6, "end"))
        top += 14
    return _svg("step", WIDTH, top, [*_axis(begin_s, end_s, top), *parts])


def _rank(kind: str) -> int:
    return [*SPANS].index(kind) if kind in SPANS else -1


def _axis(begin_s: float, end_s: float, height: int) -> Iterator[str]:
    length_s = (end_s - begin_s) or 1.0
    power = 10.0 ** floor(log10(length_s / 12))
    tick_s = next(digit * power for digit in (1, 2, 5, 10, 20) if length_s / (digit * power) <= 12)
    for number in range(-int(-begin_s // tick_s), int(end_s // tick_s) + 1):
        at_s = number * tick_s
        x = GUTTER + (at_s - begin_s) / length_s * COLUMNS
        yield f'<path class="line" d="M{x:.1f} 16V{height}"/>'
        yield _text(f"{at_s:.6g} s" if tick_s >= 1 else f"{1e3 * at_s:.8g} ms", x, 11, "middle")


def _bars(bars: Sequence[Bar], begin_s: float, scale: float, top: int, height: int) -> Iterator[str]:
    names = []
    for kind, span in bars:
        left, right = (min(COLUMNS, max(0.0, (at_s - begin_s) * scale)) for at_s in (span.start_s, span.end_s))
        title = f"{span.name or kind}, {span.window or label_of(kind, SPANS)}: {format_seconds(span.seconds)}"
        if span.micro_batch is not None:
            title += f", micro-batch {span.micro_batch}"
        yield _rect(kind, GUTTER + left, top, max(0.5, right - left), height, title)
        if kind in PASSES and span.half and right - left > 28:
            name = f"{span.half} {span.layer}" if right - left > 90 else f"{span.half[0].upper()}{span.layer}"
            names.append(_text(name, GUTTER + (left + right) / 2, top + height / 2 + 4, "in"))
    yield from names


def _shares(bars: Sequence[Bar], begin_s: float, scale: float, top: int, height: int) -> Iterator[str]:
    kinds = list(dict.fromkeys(kind for kind, _ in bars))
    samples = np.full(COLUMNS * FINE, -1)
    for kind, span in bars:
        first, last = (round((at_s - begin_s) * scale * FINE) for at_s in (span.start_s, span.end_s))
        samples[first:last] = kinds.index(kind)
    columns = samples.reshape(COLUMNS, FINE)
    for number in reversed(range(len(kinds))):
        yield _area(((columns >= 0) & (columns <= number)).mean(axis=1) * height, top + height, kinds[number])


def _held(curve: MemoryCurve, seconds: float) -> npt.NDArray[np.float64]:
    edges = np.arange(COLUMNS + 1) * (seconds / COLUMNS)
    at = np.maximum(np.searchsorted(curve.times_s, edges, side="right") - 1, 0)
    held = np.array(curve.bytes, dtype=float)
    return np.array([held[first : last + 1].max() for first, last in pairwise(at)])


def _area(heights: npt.NDArray[np.float64], bottom: int, kind: str) -> str:
    path, before = f"M{GUTTER} {bottom}", 0.0
    for column, height in enumerate(heights):
        if abs(height - before) > 0.1:
            path += f"H{GUTTER + column}V{bottom - height:.1f}"
            before = height
    return f'<path class="{_class(kind)}" d="{path}H{GUTTER + COLUMNS}V{bottom}Z"/>'


def _class(kind: str) -> str:
    return f"k-{kind}" if kind in SPANS or kind in MEMORY else "k-other"


def _rect(kind: str, x: float, y: float, width: float, height: float, title: str) -> str:
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
    return f'<rect class="{_class(kind)}" {place}><title>{escape(title)}</title></rect>'


def _text(text: str, x: float, y: float, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(name: str, width: int, height: int, parts: Sequence[str]) -> str:
    return f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def label_of(kind: str, kinds: Kinds) -> str:
    return kinds[kind][0] if kind in kinds else kind.replace("_", " ")


def colours() -> str:
    kinds = {**SPANS, **MEMORY, "other": ("", "#8c8c8c", "#9d9d9d")}
    light, dark = ("".join(f".k-{name}{{--fill:{kind[at]}}}" for name, kind in kinds.items()) for at in (1, 2))
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


def legend(kinds: Kinds, used: Collection[str]) -> str:
    names = [*(name for name in kinds if name in used), *sorted(set(used) - kinds.keys())]
    parts = (f'<span><i class="{_class(name)}"></i>{escape(label_of(name, kinds))}</span>' for name in names)
    return f'<div class="legend">{"".join(parts)}</div>'


class Device(NamedTuple):
    stage: int
    moment: str
    kinds: Mapping[str, int]
    measured_bytes: int | None

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


def devices_drawn(devices: Sequence[Device], budget_bytes: int | None) -> str:
    totals = [max(device.bytes, device.measured_bytes or 0) for device in devices]
    scale = (COLUMNS - 230) / (max([*totals, budget_bytes or 0]) or 1)
    parts, top = list[str](), 18
    for device, total in zip(devices, totals, strict=True):
        parts.append(_text(f"stage {device.stage}", 0, top + 12, "row"))
        left = float(GUTTER)
        for kind in sorted(device.kinds, key=[*MEMORY, *device.kinds].index):
            size = device.kinds[kind]
            parts.append(_rect(kind, left, top, size * scale, 16, f"{label_of(kind, MEMORY)}: {format_bytes(size)}"))
            left += size * scale
        said = f"{format_bytes(device.bytes)}, {device.moment}"
        if device.measured_bytes is not None:
            parts.append(f'<path class="mark" d="M{GUTTER + device.measured_bytes * scale:.1f} {top - 2}v20"/>')
            said += f"; measured {format_bytes(device.measured_bytes)}"
        parts.append(_text(said, max(left, GUTTER + total * scale) + 8, top + 12, "beside"))
        top += 22
    if budget_bytes is not None:
        x = GUTTER + budget_bytes * scale
        parts += [f'<path class="budget" d="M{x:.1f} 14V{top}"/>', _text(f"budget {format_bytes(budget_bytes)}", x, 11, "end")]
    return _svg("devices", WIDTH, top, parts)


class Point(NamedTuple):
    label: str
    by: str
    step_s: float
    """Including the optimizer's update."""
    memory_bytes: int | None
    budget_bytes: int | None = None
    shown: bool = False
    hidden_s: float | None = None
    exposed_s: float | None = None
    """Seconds of recomputations, on the stage that has most."""
    recomputed: str = ""
    """Items of a plan, or flags of a stock setting."""
    offloaded_bytes: int | None = None
    """Bytes of each micro-batch, on the stage that has most."""


LEFT, RIGHT, TOP, BOTTOM = 80, 660, 30, 270


def points_drawn(points: Sequence[Point], budget_bytes: int | None) -> str:
    known = [(point.memory_bytes, point.step_s, point) for point in points if point.memory_bytes and point.step_s]
    low, high = min(size for size, _, _ in known), max([budget_bytes or 0, *(size for size, _, _ in known)])
    least_s, most_s = min(step_s for _, step_s, _ in known), max(step_s for _, step_s, _ in known)

    def across(size: int) -> float:
        return LEFT + 10 + (RIGHT - LEFT - 20) * (size - low) / ((high - low) or 1)

    placed = [
        (across(size), TOP + 10 + (BOTTOM - TOP - 20) * (most_s - step_s) / ((most_s - least_s) or 1.0), point)
        for size, step_s, point in known
    ]
    parts = [f'<path class="line" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>']
    parts += [_text(format_seconds(at_s), LEFT - 6, y, "end") for at_s, y in ((most_s, TOP + 14), (least_s, BOTTOM - 6))]
    parts += [_text(f"{size / GIB:.1f} GiB", across(size), BOTTOM + 16, "middle") for size in dict.fromkeys((low, high))]
    if budget_bytes is not None:
        parts.append(f'<path class="budget" d="M{across(budget_bytes):.1f} {TOP}V{BOTTOM}"/>')
    line = sorted((x, y) for x, y, point in placed if point.by == "plan" and not point.shown)
    parts.append(f'<polyline class="accent" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in line)}"/>')
    for x, y, point in placed:
        title = escape(f"{point.label}: {format_seconds(point.step_s)} in {format_bytes(point.memory_bytes or 0)}")
        style = "shown" if point.shown else point.by
        parts.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{title}</title></circle>')
        if style != "plan":
            parts.append(_text(point.label, x, y - 9, "middle"))
    return _svg("front", RIGHT + 60, BOTTOM + 24, parts)
