"""A simulated step as a picture: stages over time, and below, on the same clock, what each stage's layers hold.

stage 0   | F0 | F1 |▒▒▒▒▒▒| B0 █| F2 |▒| B1 █| ...          as in `timeline_plot`: blue passes, grey waits,
stage 1        | F0 | B0 █ | F1 | B1 █| ...                  green replays in windows, red ones on demand

bytes     ___/¯¯¯\\___/¯¯¯¯\\____                              a line for each stage
budget    - - - - - - - - - - -
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_lynx.compare.timeline_plot import DPI, ROW_INCHES, WIDTH_INCHES, add_legend, draw_timeline, write_png
from megatron_lynx.simulator.timeline import MemoryCurve, Timeline
from megatron_lynx.units import GIB, MIB, format_bytes

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
