"""Writes answers to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, TextIO

import typer

from megatron_lynx.errors import LynxError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


WIDTH_OF_FILES = 180
SCREEN = 80
MOST_PROBLEMS = 100
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters other than tabs and line ends."""


def printable(text: str) -> str:
    """Escape control characters: users' names must not command the terminal."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def say(text: str, *, err: bool = False) -> None:
    typer.echo(_folded(printable(text)) if err else printable(text), err=err)


def _folded(text: str) -> str:
    """Fold lines of stderr at blanks, if its width is known. Words such as paths are never broken."""
    if (width := width_of_terminal(sys.stderr)) is None:
        return text
    wrapper = TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.split("\n")))


VERSION_OF_JSON = 1
"""Version of the answers of all commands. It rises when a key is removed, or changes its meaning."""


def show_json(answer: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({"version": VERSION_OF_JSON, **answer}, indent=2))


def show(answer: RenderableType) -> None:
    page().print(answer)


def show_lines(*lines: str) -> None:
    """Print prose, folded to the terminal's width if that is known."""
    if width_of_terminal() is None:
        say("\n".join(lines))
    else:
        from rich.text import Text

        show(Text("\n".join(lines)))


def show_screen(answer: RenderableType) -> None:
    page().print(answer, width=min(width_of_terminal() or SCREEN, SCREEN))


def page() -> Console:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Page(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return Page(
        file=sys.stdout or StringIO(), width=width_of_terminal() or WIDTH_OF_FILES
    )  # sys.stdout is None if the shell closed it


def width_of_terminal(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal of a stream, by default stdout, else of the variable COLUMNS, else None."""
    stream = stream or sys.stdout
    if stream is not None and stream.isatty():
        return shutil.get_terminal_size().columns
    said = os.environ.get("COLUMNS", "")
    return int(said) if said.isdecimal() and int(said) else None


def show_error(error: LynxError) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(_folded(printable(error.headline)), style="bold red"))
    for problem in error.problems[:MOST_PROBLEMS]:
        console.print(Text(_folded(f"  - {printable(str(problem))}")))
    if (more := len(error.problems) - MOST_PROBLEMS) > 0:
        console.print(f"  - and {more} more")


@contextmanager
def in_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr during the block, if that is a terminal. Yields a function of (done, total)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def watch(done: int, total: int) -> None:
            progress.update(task, description=f"{what}: {done} of {total}", completed=done, total=total)

        yield watch


@contextmanager
def announced(what: str) -> Iterator[None]:
    say(f"{what} ...", err=True)
    yield


def quieten_megatron() -> None:
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron\.core|torch")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
