"""The launcher's command line: `SCRIPT [--lynx-...] <the script's own arguments>`.

main ─> read ─> run_script                     0, or what the script ends with
         └─ LynxError ─> stderr, once per node  exit 1: the answer is no, 2: the request is wrong
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.launch.flags import Flags, read_flags
from megatron_lynx.launch.message import stop

USAGE = """\
usage: torchrun ... -m {module} SCRIPT [--lynx-host HOST] [--lynx-plan PLAN] [--lynx-trace PATH [--lynx-trace-step N]]
                    [--lynx-outcome PATH] [--lynx-check N [--lynx-check-against REFERENCE] | --lynx-check frames[:N]]
                    [--lynx-schedule flush | double-buffered] [--lynx-log LEVEL] <arguments of SCRIPT>

Runs SCRIPT, a training script of Megatron-LM, as `torchrun ... SCRIPT` would, and trains under PLAN, or without flushes.
HOST is megatron-lm, or bridge for a script of Megatron-Bridge. `SCRIPT --help` shows these flags among Megatron-LM's, with what
each does."""


HOST = "--lynx-host"


@dataclass(frozen=True)
class Command:
    script: Path
    arguments: tuple[str, ...]
    """The script's arguments, with our flags among them: Megatron's parser shows and records them."""
    flags: Flags


def read(arguments: Sequence[str]) -> Command:
    """Raises `ConfigError` where there is no such script, and for flags of ours that do not read."""
    words, host = list(arguments), list[str]()
    while words and words[0].partition("=")[0] == HOST:
        taken = 1 if "=" in words[0] else 2
        host, words = [*host, *words[:taken]], words[taken:]
    if not words or words[0].startswith("-"):
        found = "no arguments" if not words else f"{words[0]} first"
        raise ConfigError("the launch cannot be read", [Problem("command line", found, "the training script first, then flags")])
    script = Path(words[0])
    if not script.is_file():
        raise ConfigError("the launch cannot be read", [Problem(str(script), "no such file", "a training script")])
    behind = [*words[1:], *host]
    return Command(script, tuple(behind), read_flags(behind))


def main(arguments: Sequence[str], module: str = "megatron_lynx.launch") -> int:
    """Run a command line and return its exit status."""
    if list(arguments[:1]) in (["-h"], ["--help"]):
        print(USAGE.format(module=module))
        return 0
    try:
        command = read(arguments)
        from megatron_lynx.launch.script import run_script

        run_script(command)
    except LynxError as error:
        stop(error)
        return error.exit_status
    return 0
