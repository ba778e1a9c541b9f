"""Writing to the terminal: answers to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

import typer

from megatron_lynx.errors import LynxError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


WIDTH_OF_FILES = 180
"""Columns of a table that goes to a file or a pipe, which have no width of their own."""


SCREEN = 80
"""Columns of a first screen, wherever it goes."""

MOST_PROBLEMS = 100
"""Problems of one request that are printed; of more, only their number."""

PATIENCE_S = 2.0
"""Seconds before a progress bar appears."""

SECONDS_OF_A_LINE = 10.0
"""Seconds between lines about progress, where there is no terminal for a bar."""


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal takes for commands, but for tabs and ends of lines."""


def printable(text: str) -> str:
    """The text with control characters as escapes: names that users give must not command the terminal."""
    return CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def say(text: str, *, err: bool = False) -> None:
    """A line, or several, to stdout or stderr."""
    typer.echo(printable(text), err=err)


VERSION_OF_JSON = 1
"""Of the answers of all commands; it counts up when a key goes, or means something else (`cli.schema`)."""


def show_json(answer: Mapping[str, Any]) -> None:
    typer.echo(json.dumps({"version": VERSION_OF_JSON, **answer}, indent=2))


def show(answer: RenderableType) -> None:
    page().print(answer)


def show_lines(*lines: str) -> None:
    """Prose, folded at blanks where the terminal's width is known."""
    if width_of_terminal() is None:
        say("\n".join(lines))
    else:
        from rich.text import Text

        show(Text("\n".join(lines)))


def show_screen(answer: RenderableType) -> None:
    """An answer that is made for `SCREEN` columns: wherever it goes, it is no wider."""
    page().print(answer, width=min(width_of_terminal() or SCREEN, SCREEN))


def page() -> Console:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Page(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # Rich ends the command with 1, which is the answer no

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    return Page(file=sys.stdout or StringIO(), width=width_of_terminal() or WIDTH_OF_FILES)  # no stdout: the shell has closed it


def width_of_terminal() -> int | None:
    """Its columns; what COLUMNS says for an answer that goes to a file or a pipe, and None where it says nothing."""
    if sys.stdout is not None and sys.stdout.isatty():
        return shutil.get_terminal_size().columns
    said = os.environ.get("COLUMNS", "")
    return int(said) if said.isdecimal() and int(said) else None


def show_error(error: LynxError) -> None:
    """The headline, then a line per problem. Paths and names are printed as they are, never taken for markup."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(printable(error.headline), style="bold red"))
    for problem in error.problems[:MOST_PROBLEMS]:
        console.print(Text("  - ").append(printable(str(problem))))
    if (more := len(error.problems) - MOST_PROBLEMS) > 0:
        console.print(f"  - and {more} more")


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Show on stderr what is under way, while the block runs."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.print(f"{what} ...", soft_wrap=True)
        yield
        return
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(what, total=None)
        yield
        progress.update(task, total=1, completed=1)


@contextmanager
def awaited(what: str) -> Iterator[None]:
    """As `announced`, for what is usually quick: shown only after `PATIENCE_S`, or `SECONDS_OF_A_LINE` without a terminal."""
    from threading import Timer

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True)
    progress.add_task(what, total=None)
    if console.is_terminal:
        timer = Timer(PATIENCE_S, progress.start)
    else:
        timer = Timer(SECONDS_OF_A_LINE, say, (f"{what} ...",), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if progress.live.is_started:
            progress.stop()


@contextmanager
def counted(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr after `PATIENCE_S`; without a terminal, a line every `SECONDS_OF_A_LINE`."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield _in_lines(what, time.monotonic)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress, began_s = Progress(*columns, console=console, transient=True), time.monotonic()
    task = progress.add_task(what)

    def watch(done: int, total: int) -> None:
        if not progress.live.is_started and time.monotonic() - began_s > PATIENCE_S:
            progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield watch
    finally:
        progress.stop()


def _in_lines(what: str, now_s: Callable[[], float]) -> Callable[[int, int], None]:
    """A line on stderr every `SECONDS_OF_A_LINE`."""
    last_s = now_s()

    def watch(done: int, total: int) -> None:
        nonlocal last_s
        if now_s() - last_s >= SECONDS_OF_A_LINE:
            last_s = now_s()
            say(f"{what}: {done} of {total}", err=True)

    return watch


def quieten_megatron() -> None:
    """Silence Megatron's warnings that Apex and Transformer Engine are missing, and keep its import from compiling anything."""
    import warnings

    warnings.filterwarnings("ignore", module=r"megatron\.core|torch")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
