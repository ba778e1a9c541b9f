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


def _kind(name: str, label: str, light: str, dark: str, lane: Lane = "compute") -> Kind:
    return Kind(name=name, label=label, lane=lane, light=light, dark=dark)


KINDS = (
    _kind("forward", "forward", "#a8cdec", "#6ea6d6"),
    _kind("backward", "backward", "#4d87bd", "#3b6ea3"),
    _kind("wait", "unused wait", "#dcdee2", "#3d424b"),
    _kind("update", "update", "#6b7280", "#8b93a1"),
    _kind("weight_gradient", "weight gradient in a wait", "#cc79a7", "#d48db4"),
    _kind("flushed", "weight gradient outside of waits (exposed)", "#8a2f63", "#b3548b"),
    _kind("hidden", "recompute in a wait", "#009e73", "#1fb58a"),
    _kind("on_demand", "recompute on demand (exposed)", "#d55e00", "#f07f2e"),
    _kind("window", "tensor-parallel collective", "#9a86c8", "#a894d6", "communication"),
    _kind("recv", "pipeline message", "#e69f00", "#e8ad2d", "communication"),
    _kind("gather", "gathered input", "#5c3d8a", "#d0b8f5", "communication"),
    _kind("offload", "copy to the host", "#7d7a2f", "#b0ab4a", "copies"),
    _kind("reload", "copy back from the host", "#b5ad3c", "#ddd56a", "copies"),
)

"""Later kinds are drawn over earlier ones. Hues are Okabe and Ito's, safe for any colour vision."""

FALLBACK = ("#8c8c8c", "#9d9d9d")

MEMORY_KINDS = (
    _kind("kept", "kept by layers", "#4d87bd", "#3b6ea3"),
    _kind("regenerated", "regenerated by recomputation", "#009e73", "#1fb58a"),
    _kind("parameters", "parameters", "#5f6b7a", "#8b97a8"),
    _kind("gradients", "gradients", "#8795a6", "#6d7888"),
    _kind("optimizer", "optimizer", "#b4bec9", "#4f5966"),
    _kind("activations", "activations of layers", "#4d87bd", "#3b6ea3"),
    _kind("recomputed", "recomputed", "#009e73", "#1fb58a"),
    _kind("staging", "staging of copies", "#b5ad3c", "#ddd56a"),
    _kind("embedding", "embedding", "#56b4e9", "#56b4e9"),
    _kind("head", "head's inputs", "#e69f00", "#e8ad2d"),
    _kind("logits", "logits", "#d55e00", "#f07f2e"),
    _kind("in_hand", "transient of a backward", "#cc79a7", "#d48db4"),
    _kind("messages", "messages", "#9a86c8", "#a894d6"),
    _kind("buffers", "buffers", "#5c3d8a", "#d0b8f5"),
)


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
        _kind(name, name.replace("_", " "), *FALLBACK) for name in unknown
    ]
