"""Figures of a view that are the same for a simulated step and a traced one, so that they can stand side by side.

They are taken from spans alone. Bars of halves include the waits inside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_lynx.report.island import Cell, Column, Table
from megatron_lynx.report.kinds import kind_of
from megatron_lynx.report.waits import waits_of
from megatron_lynx.simulator.timeline import Span, Timeline


@dataclass(frozen=True)
class RowFigures:
    """Where one row's step went. Seconds."""

    forward_s: float
    backward_s: float
    hidden_s: float
    exposed_s: float
    """Replays on demand, and what of others was longer than their wait."""
    waits_s: float
    unused_s: float
    """What of the waits nothing used."""
    collectives_s: float
    """What of the waits is for tensor-parallel collectives."""
    collectives_unused_s: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> RowFigures:
        seconds = dict.fromkeys(("forward", "backward", "hidden", "on_demand"), 0.0)
        for span in spans:
            if (kind := kind_of(span)) in seconds:
                seconds[kind] += span.seconds
        uses = waits_of(spans)
        collectives = [use for name, use in uses.items() if not name.startswith("pipe.")]
        waits = ((sum(use.seconds for use in part), sum(use.unused_s for use in part)) for part in (uses.values(), collectives))
        return cls(*seconds.values(), *(figure for pair in waits for figure in pair))


@dataclass(frozen=True)
class Seen:
    """One view's timeline, and of each row that is shown its label, its layers and what it holds at most."""

    name: str
    step_s: float
    timeline: Timeline
    labels: Mapping[int, str]
    layers: Mapping[int, str]
    held_bytes: Mapping[int, int]

    @property
    def rows(self) -> dict[int, RowFigures]:
        return {row: RowFigures.of(self.timeline.ranks[row]) for row in self.labels}

    @property
    def hidden_share(self) -> float | None:
        """Of the seconds of replays, those behind waits."""
        rows = self.rows.values()
        hidden_s, exposed_s = sum(row.hidden_s for row in rows), sum(row.exposed_s for row in rows)
        return hidden_s / (hidden_s + exposed_s) if hidden_s + exposed_s else None

    @property
    def unused_share(self) -> float | None:
        """Of the seconds of waits for collectives, those that nothing used."""
        waits_s = sum(row.collectives_s for row in self.rows.values())
        return sum(row.collectives_unused_s for row in self.rows.values()) / waits_s if waits_s else None

    @property
    def exposed_s(self) -> float:
        """Seconds of exposed replays on the stage that has most of them."""
        return max((row.exposed_s for row in self.rows.values()), default=0.0)


def stage_table(views: Sequence[Seen]) -> Table:
    """Where the step of every row goes, in all views."""
    rows: list[list[Cell]] = []
    for seen in views:
        for row, figures in seen.rows.items():
            held = seen.held_bytes.get(row)
            rows.append([seen.labels[row], seen.name, seen.layers.get(row, ""), *vars(figures).values(), held])
    columns = [Column(label=label, unit="text") for label in ("where", "seen", "layers")]
    names = ("forward", "backward", "replays hidden", "replays exposed", "waits", "unused", "of collectives", "unused of these")
    columns += [Column(label=label, unit="s") for label in names]
    columns.append(Column(label="activations at most", unit="bytes"))
    note = (
        "Seconds of one step. Passes include the waits inside them; waits include those for messages between stages. "
        "Communication slows what runs beside it, so a bar is longer than a replay would be alone."
    )
    return Table(id="stages", title="Stages", note=note, columns=columns, rows=rows)
