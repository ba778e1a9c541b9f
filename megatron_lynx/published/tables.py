"""All rows of all papers."""

from __future__ import annotations

from megatron_lynx.published import korthikanti, overlapped, peaks, pipeoffload, steps, yuan
from megatron_lynx.published.row import Row, published_figures


def all_rows() -> list[Row]:
    """Every row, in the order of the files of figures."""
    figures = published_figures()
    parts = {"yuan_atc24": yuan, "korthikanti": korthikanti, "pipeoffload": pipeoffload}
    found = [row for name, part in parts.items() for row in part.rows(figures[name])]
    more = published_figures("published_more")
    measured = list(steps.rows(more))
    return [*found, *measured, *steps.means(measured), *peaks.rows(more), *overlapped.rows(more)]
