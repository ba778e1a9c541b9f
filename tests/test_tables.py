"""Tables on terminals of 80 and of 200 columns."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.tables import WIDEST, WrappedTable
from tests.test_cli import lynx

FIGURES = st.floats(0, 1e6).map(lambda figure: f"{figure:.2f}")
PLAN = bundled_configs() / "plans/llama3-70b-h800-80g.yaml"


def printed(table: WrappedTable, width: int) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=width).print(table)
    return [line.rstrip() for line in page.getvalue().splitlines()]


@given(st.integers(60, 220), st.lists(st.tuples(*[FIGURES] * 14), min_size=1, max_size=3))
def test_figures_are_whole_at_every_width(width: int, rows: list[tuple[str, ...]]) -> None:
    """`28.0|7` and `para|mete|rs` stood in a table of 80 columns."""
    names = ["fp8 weights", "parameters", "activations", *(f"part {number}" for number in range(11))]
    table = WrappedTable(["stage", "moment", *names], words=("moment",), keys=2)
    for number, row in enumerate(rows):
        table.add(str(number), "embedding backward", *row)
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    words = [word for line in lines for word in line.split()]
    for row in rows:
        assert all(words.count(figure) >= row.count(figure) for figure in row)
    assert {"fp8", "weights", "parameters", "activations"} <= set(words)
    parts = sum("stage" in line.split() for line in lines)
    assert words.count("embedding") == len(rows) * parts


def test_a_column_of_text_ends_where_it_can_be_read() -> None:
    """On a terminal of 200 columns, 150 blanks stood between a label and its figure."""
    table = WrappedTable(["", "what", "step"], words=("", "what"))
    table.add("today", "stock none", "20 s")
    table.add("plan", "word " * 30, "20.1 s")
    today = next(line for line in printed(table, 200) if line.startswith("today"))
    assert len(today) <= len("today") + WIDEST + len("20.1 s") + 4


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize("command", [("estimate", "jobs/llama-65b"), ("explain", PLAN), ("advise", "jobs/llama3-8b-a100-80g")])
def test_commands_keep_to_the_terminal(command: tuple[str | Path, ...], columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = lynx(*command).stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in shown
    if command[0] != "explain":  # whose cells have several lines
        assert not any("  " * 25 in line.strip() for line in lines), "blanks between label and figure"
