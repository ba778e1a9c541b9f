"""The island: the page's data as one JSON object (`<script id="island" type="application/json">`).

    views     a step, predicted and measured: rows of spans over time, and each stage's bytes
    points    plans for several budgets, and stock Megatron's settings: memory, step time, treatment of every half
    tables    figures that the page formats and sorts
    tiles     the main figures, predicted and measured

Times of spans are whole nanoseconds from the step's beginning, other quantities seconds and bytes. Missing figures are null.

    page.html   <!-- styles -->   *.css, in the order of STYLES
                <!-- island -->   the island's JSON
                <!-- scripts -->  *.js, in the order of SCRIPTS, one script in one scope

The page's content security policy forbids all requests, so that it looks the same without a network.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypedDict

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.timeline import FLUSHED, Span
from megatron_lynx.whole_file import write_whole

VERSION = 1

Unit = Literal["text", "s", "bytes", "count", "share"]

Cell = str | float | int | None


Lane = Literal["compute", "communication", "copies"]
"""Lane of a bar. In the compute lane waits are gaps, and work in a wait covers its gap."""


class Kind(TypedDict):
    name: str
    label: str
    lane: Lane
    light: str
    dark: str


class Subject(TypedDict):
    kind: str
    name: str
    layer: int | None
    half: str | None
    window: str | None


class Spans(TypedDict):
    """The spans of one row by start, as columns, because there may be a hundred thousand."""

    subject: list[int]
    micro_batch: list[int | None]
    start_ns: list[int]
    length_ns: list[int]


class Memory(TypedDict):
    """Bytes of a stage's layers from each time until the next, by kind."""

    time_ns: list[int]
    kinds: dict[str, list[int]]


class Row(TypedDict):
    """One stage, or one rank of it."""

    label: str
    number: int
    """Stage number in a predicted view, else rank."""
    stage: int
    spans: Spans
    memory: Memory | None


class View(TypedDict):
    name: Literal["predicted", "measured"]
    title: str
    step_ns: int
    subjects: list[Subject]
    rows: list[Row]


class Treatment(TypedDict):
    layers: str
    half: str
    items: list[tuple[str, Literal["keep", "recompute"]]]
    """In execution order."""
    window: str
    """Where it is recomputed; empty if it is not."""
    gather: str
    deferred: list[str]
    """Linears with delayed weight gradients, each with its waits."""


class PointStage(TypedDict):
    """One stage (or chunk of one) at a point of the front."""

    stage: int
    chunk: int
    layers: str
    treatments: list[Treatment]
    offloaded_bytes: int
    """Per micro-batch."""
    deferred_bytes: int
    """Limit of delayed weight gradients."""
    hidden_recompute_s: float | None
    exposed_recompute_s: float | None
    memory_bytes: dict[str, int]
    """Peak bytes of a device by kind; empty if unknown."""
    moment: str
    """When the peak occurs."""
    measured_bytes: int | None


class Point(TypedDict):
    """A plan, or a setting of stock Megatron."""

    label: str
    by: Literal["plan", "stock"]
    budget_bytes: int | None
    memory_bytes: int | None
    step_s: float
    """A whole step, including the optimizer's update."""
    shown: bool
    """Whether it is the plan that the rest of the page shows."""
    stages: list[PointStage]


class Column(TypedDict):
    label: str
    unit: Unit


class Table(TypedDict):
    """A table that the page can sort."""

    id: str
    title: str
    note: str
    columns: list[Column]
    rows: list[list[Cell]]


class Tile(TypedDict):
    label: str
    unit: Unit
    predicted: float | None
    measured: float | None
    note: str


class Island(TypedDict):
    version: int
    made_by: str
    title: str
    subject: str
    verdict: str
    """The plan against its baseline; empty if unknown."""
    sources: list[str]
    notes: list[str]
    tiles: list[Tile]
    kinds: list[Kind]
    memory_kinds: list[Kind]
    """Kinds of bytes; their lane is unused."""
    capacity_bytes: int | None
    views: list[View]
    points: list[Point]
    tables: list[Table]


ASSETS = Path(__file__).parent / "assets"

STYLES = ("page", "schedule", "front", "table")
SCRIPTS = (
    *("format", "element", "theme", "range", "lane", "raster", "row", "schedule", "gestures", "overview", "details"),
    *("memory", "table", "scatter", "plans", "tiles", "main"),
)
"""In dependency order."""


def write_page(island: Island, path: str | os.PathLike[str]) -> None:
    """Write the page atomically. Raises ConfigError if it cannot be written."""
    write_whole(path, page(island))


def page(island: Island) -> str:
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    data = json.dumps(island, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # cannot end its element
    parts = {
        "title": html.escape(f"{island['title']} - megatron-lynx report"),
        "styles": f"<style>\n{''.join(_asset(f'{name}.css') for name in STYLES)}</style>",
        "island": f'<script id="island" type="application/json">{data}</script>',
        "scripts": f'<script>\n"use strict";\n(() => {{\n{scripts}\n}})();\n</script>',
    }
    text = _asset("page.html")
    for name, content in parts.items():
        before, after = text.split(f"<!-- {name} -->")
        text = before + content + after
    return text


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


_OF: dict[str, list[Kind]] = json.loads((ASSETS.parent / "kinds.json").read_text(encoding="utf-8"))
KINDS, MEMORY_KINDS = _OF["spans"], _OF["memory"]
"""Later kinds are drawn over earlier ones. Hues are Okabe and Ito's, safe for any colour vision."""

FALLBACK = ("#8c8c8c", "#9d9d9d")

EXPOSED = (None, ON_DEMAND, FLUSHED)
"""`Span.window` of exposed work."""


def kind_of(span: Span) -> str:
    """Return the kind of a span's bar; a wait has that of its communication."""
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
    """Return whether the compute stream waits during the span, which leaves a gap in its lane."""
    return span.kind in ("window", "recv")


def with_fallbacks(known: Iterable[Kind], used: Iterable[str]) -> list[Kind]:
    wanted, listed = set(used), list(known)
    unknown = sorted(wanted - {kind["name"] for kind in listed})
    return [kind for kind in listed if kind["name"] in wanted] + [
        Kind(name=name, label=name.replace("_", " "), lane="compute", light=FALLBACK[0], dark=FALLBACK[1]) for name in unknown
    ]
