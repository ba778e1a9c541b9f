"""The launcher's command line, `SCRIPT [--lynx-...] <the script's own arguments>`, and the run of the script.

main ─> read ─> run_script   its folder first on the import path ─> hooks in place ─> the script as `__main__` ─> hooks removed
         └─ LynxError ─> stderr, once per node    exit 1: the answer is no, 2: the request is wrong

Flags are read before torch and Megatron are imported.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.launch.flags import Flags, add_flags, read_flags
from megatron_lynx.launch.message import say, stop

USAGE = """\
{flags}

Runs SCRIPT, a training script of Megatron-LM, as `torchrun ... SCRIPT` would, and trains under PLAN, or without flushes.
The host is megatron-lm, or bridge for a script of Megatron-Bridge. `SCRIPT --help` shows these flags among Megatron-LM's."""

HOST = "--lynx-host"


@dataclass(frozen=True)
class Command:
    script: Path
    arguments: tuple[str, ...]
    """The script's arguments, including our flags: Megatron's parser shows and records them."""
    flags: Flags


def main(arguments: Sequence[str], module: str = "megatron_lynx.launch") -> int:
    if list(arguments[:1]) in (["-h"], ["--help"]):
        usage = argparse.ArgumentParser(prog=f"torchrun ... -m {module} SCRIPT", add_help=False)
        print(USAGE.format(flags=add_flags(usage).format_help()))
        return 0
    try:
        run_script(read(arguments))
    except LynxError as error:
        stop(error)
        return error.exit_status
    return 0


def read(arguments: Sequence[str]) -> Command:
    """Parse the command line. Raises `ConfigError` if the script does not exist, or for a bad flag of ours."""
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
    return Command(script, tuple(behind), read_flags(behind))


def run_script(command: Command) -> None:
    """Run the script under the launch's hooks. Raises its errors, and `ConfigError` or `HookRefused` for a missing host."""
    from megatron_lynx.launch.launch import in_force, launch_of

    launch = launch_of(command.flags)
    argv, first = sys.argv, sys.path[0]
    sys.argv = [str(command.script), *launch.host.arguments_of(command.arguments)]
    sys.path[0] = str(command.script.resolve().parent)
    try:
        launch.host.find(str(command.script))
        with in_force(launch):
            runpy.run_path(str(command.script), run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, first


def hold(script_arguments: Sequence[str] | None = None) -> None:
    """Place the hooks until the process ends, for a script that calls this first (`patches/`), if the launcher has not.

    `script_arguments`: by default those of this process. Exits with a message for a bad flag of ours.
    """
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
