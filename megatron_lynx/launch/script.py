"""The launcher's command line, `SCRIPT [--lynx-...] <the script's own arguments>`, and the run of the script.

main ─> read ─> run_script   its folder first on the import path ─> hooks in place ─> the script as `__main__` ─> hooks removed
         └─ LynxError ─> stderr, once per node    exit 1: the answer is no, 2: the request is wrong

Flags are declared once for our own parser and for Megatron's, and read before torch and Megatron are imported.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron_lynx.errors import ConfigError, LynxError, Problem, suggestion

PREFIX = "--lynx-"
BRIDGE = "bridge"
FRAMES = "frames:"


def _step(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text}, needed a step of this run, from 1")
    return int(text)


def _check(text: str) -> int | str:
    frames = text.startswith(FRAMES.rstrip(":"))
    count = "5" if f"{text}:" == FRAMES else text.removeprefix(FRAMES)
    if not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"found {text}, needed how many steps, from 1, or frames, or frames:N")
    return f"{FRAMES}{int(count)}" if frames else int(count)


def _flag(default: Any, help_: str, **argument: Any) -> Any:
    return field(default=default, metadata={"help": help_, **argument})


@dataclass(frozen=True)
class Flags:
    """Our flags and their values. Fields are named as in Megatron's `args`."""

    lynx_plan: str | None = _flag(None, "Train under this plan. Without it nothing is changed.", metavar="PLAN")
    lynx_trace: str | None = _flag(
        None, "Write a timeline of one step, all ranks, for ui.perfetto.dev. Needs --lynx-plan.", metavar="PATH"
    )
    lynx_trace_step: int = _flag(3, "Which step of this run. Default: 3.", metavar="N", type=_step)
    lynx_outcome: str | None = _flag(
        None,
        "Write what was predicted and measured of every stage, as JSON. Default: lynx_outcome.json beside the trace, else in "
        "--tensorboard-dir, else nowhere. Needs --lynx-plan.",
        metavar="PATH",
    )
    lynx_check: int | str | None = _flag(
        None,
        "N, for deterministic runs: in the first N steps of this run, run stock on the same batch, too, and compare losses and "
        "gradients bit for bit. frames, for any run, also where backward is not deterministic (flash attention): in the first N "
        "steps (5, if not said) keep what some layer halves save, and compare it with what is recomputed and reloaded. Both stop "
        "at the first difference. Needs --lynx-plan.",
        metavar="N|frames[:N]",
        type=_check,
    )
    """A number of steps, or `frames:N`. A plain type, because Megatron stores it in checkpoints."""
    lynx_check_against: str = _flag(
        "none",
        "Stock without recomputation (none, the default), or with full recomputation (full), which needs less memory.",
        choices=("none", "full"),
    )
    lynx_schedule: str = _flag(
        "flush",
        "double-buffered: do not empty the pipeline before each update. Keeps two versions of the weights, and changes how the "
        "model learns: gradients are one update old. Default: flush, as ever.",
        choices=("flush", "double-buffered"),
    )
    lynx_host: str = _flag(
        "megatron-lm",
        "Whose training the script calls: Megatron-LM's (the default), or Megatron-Bridge's, whose `pretrain` takes a "
        "configuration. May stand before the script.",
        choices=("megatron-lm", BRIDGE),
    )
    lynx_log: str = _flag(
        "warning", "What megatron-lynx says on rank 0 beside its summary.", choices=("debug", "info", "warning", "error")
    )

    @property
    def without_flushes(self) -> bool:
        return self.lynx_schedule == "double-buffered"

    @property
    def checked_steps(self) -> int:
        return int(str(self.lynx_check or 0).removeprefix(FRAMES))

    @property
    def checks_frames(self) -> bool:
        return isinstance(self.lynx_check, str)

    @property
    def outcome(self) -> Path | None:
        return None if self.lynx_outcome is None else Path(self.lynx_outcome)

    @property
    def trace(self) -> Path | None:
        return None if self.lynx_trace is None else Path(self.lynx_trace)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        flag, _, text = message.removeprefix("argument ").partition(": ")
        raise ConfigError("the launch cannot be read", [Problem(flag, text or message, "", "see --help")])


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("megatron-lynx")
    for flag in fields(Flags):
        group.add_argument(f"--{flag.name.replace('_', '-')}", default=flag.default, **flag.metadata)
    return parser


def flags_in(arguments: Sequence[str]) -> tuple[Flags, list[Problem]]:
    try:
        namespace, script_words = add_flags(_Parser(add_help=False, allow_abbrev=False)).parse_known_args(list(arguments))
    except ConfigError as error:
        return Flags(), list(error.problems)
    known = [f"--{field.name.replace('_', '-')}" for field in fields(Flags)]
    problems = []
    for flag in (word.partition("=")[0] for word in script_words if word.startswith(PREFIX)):
        problems.append(Problem(flag, "no such flag", f"one of {', '.join(known)}", suggestion(flag, known)))
    return Flags(**vars(namespace)), problems


def read_flags(arguments: Sequence[str]) -> Flags:
    """Parse our flags among a script's arguments. Raises `ConfigError` for an unknown, bad or useless flag of ours."""
    flags, problems = flags_in(arguments)
    without_plan = (
        ("--lynx-trace", flags.lynx_trace, "there is nothing to trace"),
        ("--lynx-outcome", flags.lynx_outcome, "nothing is predicted"),
        ("--lynx-check", flags.lynx_check, "there is nothing to check"),
    )
    if flags.lynx_plan is None:
        given = [(flag, why) for flag, value, why in without_plan if value is not None]
        problems += [Problem(flag, "no --lynx-plan", f"one: without a plan {why}") for flag, why in given]
    if flags.lynx_check is None and flags.lynx_check_against != Flags.lynx_check_against:
        problems.append(Problem("--lynx-check-against", "no --lynx-check", "one: how many steps are to be checked"))
    if flags.checks_frames and flags.lynx_check_against != Flags.lynx_check_against:
        compared = f"--lynx-check {flags.lynx_check}, which compares with no stock"
        problems.append(Problem("--lynx-check-against", compared, "--lynx-check N, or without this flag"))
    if problems:
        raise ConfigError("the launch cannot be read", problems)
    return flags


def say(text: str) -> None:
    """Print a line with a single write. `print` makes two, and another rank's line may come between them."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def stop(error: LynxError) -> None:
    """Print an error, and in a distributed job exit at once: a normal exit would wait for ranks that may wait in a collective."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    in_job = distributed is not None and distributed.is_initialized()
    if in_job or os.environ.get("LOCAL_RANK", "0") == "0":
        rank = f"rank {os.environ.get('RANK', '0')}: " if in_job else ""
        say(f"megatron-lynx: {rank}{error}")
    if in_job:
        sys.stdout.flush()
        os._exit(error.exit_status)


USAGE = """\
{flags}

Runs SCRIPT, a training script of Megatron-LM, as `torchrun ... SCRIPT` would, and trains under PLAN, or without flushes.
The host is megatron-lm, or bridge for a script of Megatron-Bridge."""

HOST = "--lynx-host"


def main(arguments: Sequence[str], module: str = "megatron_lynx.launch") -> int:
    if list(arguments[:1]) in (["-h"], ["--help"]):
        usage = argparse.ArgumentParser(prog=f"torchrun ... -m {module} SCRIPT", add_help=False)
        print(USAGE.format(flags=add_flags(usage).format_help()))
        return 0
    try:
        run_script(*read(arguments))
    except LynxError as error:
        stop(error)
        return error.exit_status
    return 0


def read(arguments: Sequence[str]) -> tuple[Path, list[str], Flags]:
    """The script, its arguments, and our flags, which are among them: Megatron's parser shows and records them.

    Raises `ConfigError` if the script does not exist, or for a bad flag of ours.
    """
    words, host = list(arguments), list[str]()
    while words and words[0].partition("=")[0] == HOST:
        taken = 1 if "=" in words[0] else 2
        host, words = [*host, *words[:taken]], words[taken:]
    if not words or words[0].startswith("-"):
        start = "no arguments" if not words else f"{words[0]} first"
        raise ConfigError("the launch cannot be read", [Problem("command line", start, "the training script first, then flags")])
    script = Path(words[0])
    if not script.is_file():
        raise ConfigError("the launch cannot be read", [Problem(str(script), "no such file", "a training script")])
    behind = [*words[1:], *host]
    return script, behind, read_flags(behind)


def run_script(script: Path, arguments: Sequence[str], flags: Flags) -> None:
    """Run the script under the launch's hooks. Raises its errors, and `ConfigError` or `HookRefused` for a missing host."""
    from megatron_lynx.launch.launch import in_force, launch_of

    launch = launch_of(flags)
    argv, first = sys.argv, sys.path[0]
    sys.argv = [str(script), *launch.host.arguments_of(arguments)]
    sys.path[0] = str(script.resolve().parent)
    try:
        launch.host.find(str(script))
        with in_force(launch):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, first


def hold(script_arguments: Sequence[str] | None = None) -> None:
    """Place the hooks until the process ends, if the launcher has not, for a script that calls this first (`patches/`)."""
    from megatron.training import arguments

    from megatron_lynx.apply import hook as holding
    from megatron_lynx.launch.launch import held, launch_of

    if getattr(arguments.add_megatron_arguments, holding.MARK, False):
        return
    try:
        held(launch_of(read_flags(sys.argv[1:] if script_arguments is None else script_arguments)))
    except LynxError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"megatron-lynx: {error}")
        sys.exit(error.exit_status)
