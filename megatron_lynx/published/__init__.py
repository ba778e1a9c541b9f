"""Recomputes published measurements, to validate the cost model."""

from __future__ import annotations

from megatron_lynx.published import korthikanti, pipeoffload, steps, yuan
from megatron_lynx.published.row import Row, published_figures


def all_rows() -> list[Row]:
    figures = published_figures()
    parts = {"yuan_atc24": yuan, "korthikanti": korthikanti, "pipeoffload": pipeoffload}
    found = [row for name, part in parts.items() for row in part.rows(figures[name])]
    series = {each["id"]: each for each in published_figures("published_more")["series"]}
    measured = list(steps.rows(series))
    return [*found, *measured, *steps.means(measured), *steps.peaks(series), *steps.overlapped(series)]
