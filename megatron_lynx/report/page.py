"""Parts of the page, a file without scripts that looks the same without a network. A figure is `<data value="EXACT">`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from io import StringIO
from pathlib import Path

from rich.console import Console, RenderableType

from megatron_lynx.report.drawing import SPANS, bars_of, colours, legend, part_of, step_drawn
from megatron_lynx.report.tables import Cell, Table, Tile, Unit
from megatron_lynx.report.views import View
from megatron_lynx.units import format_bytes, format_seconds

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, body: Iterable[str]) -> str:
    styles = (Path(__file__).parent / "page.css").read_text(encoding="utf-8") + colours()
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
    head += f"<title>{escape(title)} - megatron-lynx report</title>\n<style>\n{styles}</style>"
    lines = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{lines}\n</body></html>\n'


def heading(title: str, subject: str, verdict: str) -> str:
    return f'<h1>{escape(title)}</h1><p class="soft">{escape(subject)}</p><p class="verdict">{escape(verdict)}</p>'


def bullets(lines: Iterable[str]) -> str:
    return f'<ul class="hint">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def preformatted(answer: RenderableType) -> str:
    file = StringIO()
    Console(file=file, width=150).print(answer)
    return f"<pre>{escape(file.getvalue())}</pre>"


def tiles(shown: Iterable[Tile]) -> str:
    return f'<div class="tiles">{"".join(map(_tile, shown))}</div>'


def _tile(tile: Tile) -> str:
    predicted, measured = (_cell(value, tile.unit) for value in (tile.predicted, tile.measured))
    shown, said = (predicted, "predicted") if tile.measured is None else (measured, "measured")
    if tile.measured is not None and tile.predicted is not None:
        said += f"; predicted {predicted}"
        if tile.unit != "share" and tile.measured:
            said += f" ({(tile.predicted / tile.measured - 1) * 100:+.1f} %)"
    return f'<div class="tile" title="{escape(tile.note)}">{escape(tile.label)}<b>{shown}</b>{said}</div>'


def step(view: View) -> str:
    used = {kind for row in view.stages for kind, _ in bars_of(view.timeline.ranks[row])}
    part, more = part_of(view), ""
    if part is not None:
        more = " In the whole step, heights are shares of time; below it a part from its middle, bar by bar."
    hint = "Lanes: compute, communication, copies, and bytes of the layers (green: recomputed)."
    hint = f"{view.title.capitalize()}. {hint}{more} For any other part: simulate --trace and ui.perfetto.dev."
    pictures = step_drawn(view, single=part is None) + ("" if part is None else step_drawn(view, part, single=True))
    return f'<h2>One step, {view.name}</h2>{legend(SPANS, used)}<p class="hint">{escape(hint)}</p>{pictures}'


def table(shown: Table) -> str:
    units = list(shown.columns.values())
    head = "".join(f"<th{_side(unit)}>{escape(label)}</th>" for label, unit in shown.columns.items())
    rows = (
        "".join(f"<td{_side(unit)}>{_cell(cell, unit)}</td>" for cell, unit in zip(row, units, strict=True)) for row in shown.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    found = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if shown.rows else "None."
    note = f'<h3>{escape(shown.title)}</h3><p class="hint">{escape(shown.note)}</p>'
    return f'{note}<div class="scroller" id="{shown.id}">{found}</div>'


def _side(unit: Unit) -> str:
    return "" if unit == "text" else ' class="number"'


def _cell(value: Cell, unit: Unit) -> str:
    if value is None:
        return "&ndash;"
    if isinstance(value, str):
        return escape(value)
    how: dict[str, Callable[[float], str]]
    how = {"s": format_seconds, "bytes": format_bytes, "share": lambda share: f"{100 * share:.0f} %"}
    return f'<data value="{value!r}">{how.get(unit, "{:.4g}".format)(value)}</data>'
