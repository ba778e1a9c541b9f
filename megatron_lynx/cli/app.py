"""The typer application, how commands register, and how errors end a command (1: the answer is no, 2: the request is wrong)."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from io import TextIOWrapper
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from megatron_lynx.cli.terminal import printable, say, show_error
from megatron_lynx.errors import LynxError, in_words
from megatron_lynx.version import __version__


class ErrorBoundary(TyperGroup):
    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _boundary():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _boundary():
            return super().invoke(ctx)


@contextmanager
def _boundary() -> Iterator[None]:
    try:
        yield
    except LynxError as error:
        show_error(error)
        raise typer.Exit(error.exit_status) from None
    except Exception as error:  # usage errors repeat the user's text
        if isinstance(text := getattr(error, "message", None), str):
            vars(error)["message"] = printable(text)
        raise


app = typer.Typer(cls=ErrorBoundary, no_args_is_help=True, pretty_exceptions_enable=False)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a command. Each field of a parameter that is a dataclass becomes an option."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        kind = groups.get(parameter.name)
        if kind is None:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = parameter.empty if field.default is MISSING else field.default
            option = parameter.replace(name=field.name, kind=parameter.KEYWORD_ONLY)
            parameters.append(option.replace(default=default, annotation=types[field.name]))

    def flat(**values: Any) -> None:
        made = {name: kind(**{field.name: values.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()}
        function(**made, **values)

    flat.__name__, flat.__doc__ = function.__name__, function.__doc__
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command()(flat)
    return function


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
    gc.set_threshold(50_000, 20, 50)  # planning makes many objects and no cycles
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends a command as it ends others
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names may have characters that the terminal's encoding lacks
    try:
        try:
            app(prog_name="megatron-lynx")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        say(_in_words(error), err=True)
        if error.filename is None:  # Python would try to write the remaining output again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(2)


def _in_words(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename} cannot be used: {in_words(error)}"
    return f"standard output cannot be written: {in_words(error)}"
