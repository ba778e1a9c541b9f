"""Tables on a terminal: as wide as their contents, never wider than the terminal.

Columns that do not fit into a line continue below, after the key columns, which are repeated. Figures are never broken; text is
folded at blanks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

NARROWEST = 16
"""Minimum width of a text column, in characters."""

LONGEST_WORD = 28
"""Words up to this length are never broken."""

WIDEST = 60
"""Maximum width of a text column."""

READABLE = 100
"""Maximum width of prose."""

GAP = 2
"""Blanks between columns."""


@dataclass
class WrappedTable:
    columns: Sequence[str]
    words: Collection[str] = ()
    """Names of text columns; the others are figures, aligned right."""
    keys: int = 1
    """Number of first columns that are repeated in each part."""
    title: str = ""
    lines: bool = False
    rows: list[tuple[Sequence[str | Text], str]] = field(default_factory=list)

    def add(self, *cells: str | Text, style: str = "") -> None:
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[RenderableType] = [Text(self.title, style="bold")] if self.title else []
        for number, chosen in enumerate(self._parts(options.max_width)):
            parts += [Text("")] if number else []
            parts.append(self._part(chosen, options.max_width))
        yield Group(*parts)

    def _parts(self, width: int) -> Iterator[list[int]]:
        keys = list(range(self.keys))
        part = list(keys)
        for column in range(self.keys, len(self.columns)):
            if part != keys and sum(self._limits(shown_column)[0] for shown_column in [*part, column]) + GAP * len(part) > width:
                yield part
                part = list(keys)
            part.append(column)
        yield part

    def _limits(self, column: int) -> tuple[int, int]:
        cells = [str(cells[column]) for cells, _ in self.rows]
        head = self.columns[column]
        least = max(map(len, head.split()), default=0)
        longest = max((len(line) for cell in cells for line in cell.splitlines()), default=0)
        if head not in self.words:
            return max(least, longest), max(len(head), longest)
        word = max(map(len, chain.from_iterable(cell.split() for cell in cells)), default=0)
        least = max(least, min(word, LONGEST_WORD), min(longest, NARROWEST))
        return least, max(least, len(head), min(longest, WIDEST))

    def _part(self, chosen: Sequence[int], width: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0), header_style="bold")
        table.show_lines = self.lines
        for column, column_width in zip(chosen, self._widths(chosen, width), strict=True):
            name = self.columns[column]
            table.add_column(name, justify="left" if name in self.words else "right", overflow="fold", width=column_width)
        for cells, style in self.rows:
            table.add_row(*(cells[column] for column in chosen), style=style)
        return table

    def _widths(self, chosen: Sequence[int], width: int) -> list[int]:
        """The minimum of each column, and a share of the rest of the line, with the least demanding columns first."""
        limits = [self._limits(column) for column in chosen]
        widths = [least for least, _ in limits]
        left = width - sum(widths) - GAP * (len(widths) - 1)
        by_need = sorted(range(len(limits)), key=lambda index: limits[index][1] - limits[index][0])
        for number, index in enumerate(by_need):
            more = min(limits[index][1] - limits[index][0], max(0, left) // (len(by_need) - number))
            widths[index] += more
            left -= more
        return widths
