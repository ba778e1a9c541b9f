"""The command `megatron-lynx`. What each command does is elsewhere; here is how it is asked and how it answers.

    arguments ─> one small function ─> its machinery, imported inside ─> stdout: tables, or JSON with --json
                        └─ LynxError ─> stderr: every problem                exit 1: the answer is no, 2: the request is wrong

No import at the top but the command line's own: `--help` must not wait for torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from megatron_lynx.errors import LynxError
from megatron_lynx.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType


class ErrorBoundary(TyperGroup):
    """Every error of this package ends a command here: its problems on stderr, its exit status, no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LynxError as error:
            _show_error(error)
            raise typer.Exit(error.exit_status) from None


app = typer.Typer(cls=ErrorBoundary, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, for programs.")]


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


@app.command()
def explain(plan_file: PlanFile, as_json: AsJson = False) -> None:
    """What a plan does, stage by stage: kept, replayed, where, and what is expected of it."""
    from megatron_lynx.plan import load_plan
    from megatron_lynx.plan.explanation import explanation

    plan = load_plan(plan_file)
    if as_json:
        _print_json(plan.model_dump(mode="json", exclude_none=True))
    else:
        _print(explanation(plan))


def main() -> None:
    """The console script."""
    app(prog_name="megatron-lynx")


def _print_json(answer: Any) -> None:
    typer.echo(json.dumps(answer, indent=2))


def _print(answer: RenderableType) -> None:
    from rich.console import Console

    Console().print(answer)


def _show_error(error: LynxError) -> None:
    """The headline, then a line per problem. Paths and names are printed as they are, never taken for markup."""
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(Text(error.headline, style="bold red"))
    for problem in error.problems:
        console.print(Text("  - ").append(str(problem)))


if __name__ == "__main__":
    main()
