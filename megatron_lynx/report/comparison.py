"""A comparison's settings as a table of the page: stock Megatron's beside the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_lynx.report.island import Cell, Column, Table, Unit

if TYPE_CHECKING:
    from megatron_lynx.measure.measurement import Measurement


def settings_table(measurement: Measurement) -> Table:
    """A row for each setting that was timed."""
    from megatron_lynx.compare.report import verdicts
    from megatron_lynx.compare.table import rows_of

    rows: list[list[Cell]] = [
        [
            row.setting,
            row.step_s,
            row.ratio_to_none,
            row.activation_bytes,
            row.peak_bytes,
            row.hidden_replays,
            row.on_demand_replays,
            {True: "yes", False: "NO", None: "reference" if row.ratio_to_none == 1.0 else "not compared"}[row.gradients_equal],
        ]
        for row in rows_of(measurement)
    ]
    columns: tuple[tuple[str, Unit], ...] = (
        ("setting", "text"),
        ("step", "s"),
        ("of none", "share"),
        ("resident activations", "bytes"),
        ("peak", "bytes"),
        ("replays hidden", "count"),
        ("replays on demand", "count"),
        ("gradients equal", "text"),
    )
    return Table(
        id="settings",
        title="Settings side by side, measured",
        note=" ".join(verdicts(measurement)),
        columns=[Column(label=label, unit=unit) for label, unit in columns],
        rows=rows,
    )


def how_measured(measurement: Measurement) -> list[str]:
    """How times and bytes were counted, on what, and what was left out."""
    from megatron_lynx.compare.report import notes

    return list(notes(measurement))
