"""Recomputes published measurements, to validate the cost model."""

from __future__ import annotations

from megatron_lynx.published import korthikanti, pipeoffload, runs, yuan
from megatron_lynx.published.row import Row, published_figures


def all_rows() -> list[Row]:
    figures = published_figures()
    parts = {"yuan_atc24": yuan, "korthikanti": korthikanti, "pipeoffload": pipeoffload}
    paper_rows = [row for name, part in parts.items() for row in part.rows(figures[name])]
    return [*paper_rows, *runs.rows("published_more"), *runs.rows("published_launches")]
