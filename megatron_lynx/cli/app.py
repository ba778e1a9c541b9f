"""The application: how errors end a command, and what every command shares.

command ─> LynxError ─> stderr: every problem                exit 1: the answer is no, 2: the request is wrong
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_lynx.cli.terminal import show_error
from megatron_lynx.errors import LynxError
from megatron_lynx.version import __version__


class ErrorBoundary(TyperGroup):
    """Every error of this package ends a command here: its problems on stderr, its exit status, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LynxError as error:
            show_error(error)
            raise typer.Exit(error.exit_status) from None


app = typer.Typer(cls=ErrorBoundary, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def megatron_lynx(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Overlapped recomputation for Megatron-LM: activation memory made cheap."""


def main() -> None:
    """The console script. An answer that nobody can be given is an error like others."""
    try:
        try:
            app(prog_name="megatron-lynx")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of the answer must not be tried again
        typer.echo(f"standard output cannot be written: {(error.strerror or str(error)).lower()}", err=True)
        sys.exit(2)
