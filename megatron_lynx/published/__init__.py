"""Recomputes published measurements, to validate the cost model."""

from __future__ import annotations

from megatron_lynx.published import korthikanti, launches, pipeoffload, steps, yuan
from megatron_lynx.published.row import Row, published_figures


def all_rows() -> list[Row]:
    figures = published_figures()
    parts = {"yuan_atc24": yuan, "korthikanti": korthikanti, "pipeoffload": pipeoffload}
    paper_rows = [row for name, part in parts.items() for row in part.rows(figures[name])]
    series = {entry["id"]: entry for entry in published_figures("published_more")["series"]}
    measured = list(steps.rows(series))
    return [*paper_rows, *measured, *steps.means(measured), *steps.peaks(series), *steps.overlapped(series), *launches.rows()]
