r"""A picture of one step: what every rank computed, what it waited for, and what was replayed meanwhile.

    rank 0  compute        | A1 | M1 |▒▒| ... | M4 |██░| A4 |██░| ...     █ replay in a window   ░ still waiting
            communication       ▬▬     ▬▬           ▬▬▬      ▬▬▬          ▬ window

What each bar stands for: `bars`. What is left grey is time in which the rank did nothing.

A simulated step: stages over time, and below, on the same clock, what each stage's layers hold.

stage 0   | F0 | F1 |▒▒▒▒▒▒| B0 █| F2 |▒| B1 █| ...          as above: blue passes, grey waits,
stage 1        | F0 | B0 █ | F1 | B1 █| ...                  green replays in windows, red ones on demand

bytes     ___/¯¯¯\___/¯¯¯¯\____                              a line for each stage
budget    - - - - - - - - - - -
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron_lynx.compare.bars import BACKWARD, FORWARD, HIDDEN, ON_DEMAND, STYLES, WAITING, Bar, Style, bars_of
from megatron_lynx.simulator.timeline import MemoryCurve, Span, Timeline
from megatron_lynx.units import GIB, MIB, format_bytes
from megatron_lynx.whole_file import write_whole

DPI = 160
WIDTH_INCHES = 16.0
ROW_INCHES = 1.4
NAME_INCHES, TURNED_INCHES, PHASE_INCHES, NUMBER_INCHES = 0.24, 0.10, 0.6, 0.16
"""Bars narrower than this carry no name: halves, replays (whose names are turned), stretches of halves (named by pass and
micro-batch, or by the micro-batch alone)."""


HOW_TO_READ = (
    "A3, M3: attention, MLP half of layer 3. Wide lane: compute; narrow lane: awaited communication; white: outside layers."
)


def timeline_figure(timeline: Timeline, title: str) -> Figure:
    """The picture, not yet written. Bars of one rank, lane and style are one collection, its gid `rank/lane/label`."""
    figure = Figure(figsize=(WIDTH_INCHES, 1.6 + ROW_INCHES * max(1, len(timeline.ranks))), dpi=DPI, layout="constrained")
    add_legend(figure, draw_timeline(figure.add_subplot(), timeline, title))
    return figure


def draw_timeline(axes: Axes, timeline: Timeline, title: str, labels: Sequence[str] | None = None) -> set[Style]:
    """Draw a row for each of the timeline's ranks; the styles that were used. `labels`: of the rows, instead of their own."""
    used: set[Style] = set()
    for row, (rank, spans) in enumerate(timeline.ranks.items()):
        bars = bars_of(spans)
        used.update(bar.style for bar in bars)
        _draw_rank(axes, rank, row, bars, timeline.seconds)
    _dress(axes, timeline, title, labels or [_row_label(timeline, rank) for rank in timeline.ranks])
    return used


MOST_IN_A_LINE = 5
"""Entries in one line of the legend: with more it would be wider than the picture."""


def add_legend(figure: Figure, used: set[Style]) -> None:
    """A legend of the styles that were used."""
    handles = [Patch(facecolor=style.face, label=style.label) for style in STYLES if style in used]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(MOST_IN_A_LINE, max(1, len(handles))), frameon=False, fontsize=9.5
    )


def plot_timeline(timeline: Timeline, path: str | os.PathLike[str], title: str) -> None:
    """Write the picture as PNG. Raises ConfigError where it cannot be written."""
    write_png(timeline_figure(timeline, title), path)


def write_png(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Raises ConfigError where the file cannot be written."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", facecolor="white")
    write_whole(path, picture.getvalue())


LANES = {"compute": (0.27, 0.40), "communication": (0.07, 0.15)}
"""Bottom and height of each lane within a rank's row of height 1. Above them: names of halves, then phases."""
HALF_NAMES, PHASE_LINE = 0.73, 0.84


def _draw_rank(axes: Axes, rank: int, row: int, bars: list[Bar], total_s: float) -> None:
    for lane, (bottom, height) in LANES.items():
        for style in STYLES:
            drawn = [bar.span for bar in bars if bar.lane == lane and bar.style is style]
            if drawn:
                axes.broken_barh(
                    [(span.start_s, span.seconds) for span in drawn],
                    (-row - 1 + bottom, height),
                    facecolor=style.face,
                    edgecolor="white",
                    linewidth=0.0 if style is WAITING else _edge_width(drawn, total_s),
                    zorder=style.order,
                    gid=f"{rank}/{lane}/{style.label}",
                )
    compute = [bar for bar in bars if bar.lane == "compute"]
    _name_halves(axes, [bar.span for bar in compute if bar.style in (FORWARD, BACKWARD)], -row - 1, total_s)
    _name_replays(axes, [bar.span for bar in compute if bar.style in (HIDDEN, ON_DEMAND)], -row - 1, total_s)


def _edge_width(spans: list[Span], total_s: float) -> float:
    """Thin bars have thin edges, or a deep model's step would be all edges."""
    mean_inches = WIDTH_INCHES * sum(span.seconds for span in spans) / len(spans) / (total_s or 1.0)
    return min(0.8, 4 * mean_inches)


def _name_halves(axes: Axes, spans: list[Span], bottom: float, total_s: float) -> None:
    """Names above the bars; above those one line for each stretch of halves of one pass and micro-batch (the first is 0)."""
    first = min((span.micro_batch for span in spans if span.micro_batch is not None), default=0)
    for span in spans:
        if WIDTH_INCHES * span.seconds >= NAME_INCHES * total_s:
            _write(axes, _short(span), span, bottom + HALF_NAMES, "#666666")
    for (kind, micro_batch), stretch in groupby(spans, key=lambda span: (span.kind, span.micro_batch)):
        halves = list(stretch)
        whole = Span(kind, halves[0].start_s, halves[-1].end_s)
        colour = "#5b8fbf" if kind == "forward" else "#1f4e79"
        axes.hlines(bottom + PHASE_LINE, whole.start_s, whole.end_s, color=colour, linewidth=1.6)
        number = "" if micro_batch is None else str(micro_batch - first)
        inches = WIDTH_INCHES * whole.seconds / (total_s or 1.0)
        text = f"{kind} {number}".strip() if inches >= PHASE_INCHES else number if inches >= NUMBER_INCHES else ""
        if text:
            _write(axes, text, whole, bottom + PHASE_LINE + 0.07, colour)


def _name_replays(axes: Axes, spans: list[Span], bottom: float, total_s: float) -> None:
    low, height = LANES["compute"]
    for span in spans:
        if WIDTH_INCHES * span.seconds >= TURNED_INCHES * total_s:
            _write(axes, _short(span), span, bottom + low + height / 2, "white", turned=True)


def _short(span: Span) -> str:
    return f"{(span.half or ' ')[0].upper()}{span.layer or ''}".strip()


def _write(axes: Axes, text: str, span: Span, height: float, colour: str, turned: bool = False) -> None:
    place = ((span.start_s + span.end_s) / 2, height)
    axes.annotate(
        text, place, ha="center", va="center", fontsize=7 if turned else 8, color=colour, rotation=90 if turned else 0, zorder=6
    )


def _dress(axes: Axes, timeline: Timeline, title: str, labels: Sequence[str]) -> None:
    rows = range(len(timeline.ranks))
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=22)
    axes.text(0, 1, HOW_TO_READ, transform=axes.transAxes, fontsize=9.5, color="#555555", va="bottom")
    axes.set_yticks([-row - 0.5 for row in rows], labels)
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.set_ylim(-max(1, len(rows)), 0)
    axes.set_xlim(0, timeline.seconds or 1.0)
    axes.set_xlabel("seconds")
    axes.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for row in rows[1:]:
        axes.axhline(-row, color="#dddddd", linewidth=0.8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _row_label(timeline: Timeline, rank: int) -> str:
    hidden, exposed = timeline.hidden_replays(rank), timeline.on_demand_replays(rank)
    return f"rank {rank}\n{hidden} replays in windows\n{exposed} on demand" if hidden + exposed else f"rank {rank}"


MEMORY_INCHES = 3.2
LEAST_ROW_INCHES, MOST_INCHES = 0.9, 12.0
"""Bounds of a stage's row and of all rows together: the rows of deep pipelines are lower."""
LINES = ("#1f4e79", "#c8641a", "#2e7d4f", "#7a4fa3", "#a3324a", "#4f8a94", "#8a6d1f", "#555555")
"""Colours of the stages' lines, used in turn; the legend names the stages and their peaks."""
BUDGET = "#d6301d"


@dataclass(frozen=True)
class Shown:
    """What a picture shows of a simulated step. `notes` stand below each stage's name; `memory` is by stage."""

    timeline: Timeline
    memory: Mapping[int, MemoryCurve]
    notes: Mapping[int, str] = field(default_factory=dict)
    budget_bytes: float | None = None
    """Without one, no line is drawn for it."""


def simulation_figure(shown: Shown, title: str) -> Figure:
    """The picture, not yet written."""
    timeline = shown.timeline
    rows_inches = max(LEAST_ROW_INCHES, min(ROW_INCHES, MOST_INCHES / max(1, len(timeline.ranks)))) * max(1, len(timeline.ranks))
    figure = Figure(figsize=(WIDTH_INCHES, 2.0 + rows_inches + MEMORY_INCHES), dpi=DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(rows_inches, MEMORY_INCHES))
    labels = [f"stage {stage}\n{shown.notes.get(stage, '')}".strip() for stage in timeline.ranks]
    used = draw_timeline(above, timeline, title, labels)
    above.set_xlabel("")
    _draw_memory(below, timeline.seconds, shown.memory, shown.budget_bytes)
    add_legend(figure, used)
    return figure


def plot_simulation(shown: Shown, path: str | os.PathLike[str], title: str) -> None:
    """Write the picture as PNG. Raises ConfigError where it cannot be written."""
    write_png(simulation_figure(shown, title), path)


def _draw_memory(axes: Axes, step_s: float, memory: Mapping[int, MemoryCurve], budget_bytes: float | None) -> None:
    most = max([curve.peak_bytes for curve in memory.values()] + [budget_bytes or 0], default=0)
    unit, name = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    for stage, curve in memory.items():
        colour = LINES[stage % len(LINES)]
        points = list(_points(curve))
        times_s = [*(time_s for time_s, _ in points), step_s]
        held = [*(count / unit for _, count in points), points[-1][1] / unit]
        label = f"stage {stage}, at most {format_bytes(curve.peak_bytes)}"
        axes.step(times_s, held, where="post", color=colour, linewidth=1.4, label=label, gid=f"memory/{stage}")
        axes.fill_between(times_s, held, step="post", color=colour, alpha=0.08, linewidth=0)
    if budget_bytes is not None:
        label = f"budget, {format_bytes(budget_bytes)}"
        axes.axhline(budget_bytes / unit, color=BUDGET, linewidth=1.2, linestyle="--", label=label, gid="memory/budget")
    axes.set_ylim(0, 1.12 * most / unit or 1.0)
    axes.set_ylabel(f"activations of layers, {name}")
    axes.set_xlabel("seconds")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9.5)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _points(curve: MemoryCurve) -> Iterator[tuple[float, int]]:
    """The curve without dips of no duration: what is let go and taken at one moment. Peaks of no duration stay."""
    for time_s, group in groupby(zip(curve.times_s, curve.bytes, strict=True), key=lambda point: point[0]):
        held = [count for _, count in group]
        if max(held) > held[-1]:
            yield time_s, max(held)
        yield time_s, held[-1]
