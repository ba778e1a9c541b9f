"""Runs the training script as `python SCRIPT ARGUMENTS` would, with the launch's hooks in place.

its folder first on the import path ─> hold ─> its text as `__main__` ─> give back
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_lynx.apply import hook as holding
from megatron_lynx.errors import HookRefused, LynxError
from megatron_lynx.launch.command import Command
from megatron_lynx.launch.ending import named_ending
from megatron_lynx.launch.flags import read_flags
from megatron_lynx.launch.hooks import arguments
from megatron_lynx.launch.hosts import host_named
from megatron_lynx.launch.hosts.host import Host
from megatron_lynx.launch.launch import Launch
from megatron_lynx.launch.message import say


def run_script(command: Command) -> None:
    """Raises what the script raises, `SystemExit` included.

    Raises:
        ConfigError: the host's training cannot be imported from where the script would import it.
        HookRefused: it has not the functions that a launch goes through.
    """
    logging.getLogger("megatron_lynx").setLevel(command.flags.lynx_log.upper())
    host = host_named(command.flags.lynx_host)
    with _as_its_own_process(command, host):
        host.find(str(command.script))
        launch = Launch(command.flags, host)
        hooks = held(launch)
        try:
            with named_ending(lambda: launch.how_far), launch.memory.watching():
                runpy.run_path(str(command.script), run_name="__main__")
        finally:
            holding.give_back(hooks)


def hold(script_arguments: Sequence[str] | None = None) -> None:
    """Put the hooks in place until the process ends, for a script that calls this first (`patches/`).

    `script_arguments`: by default those of this process. Ends the process, and says why, for flags of ours that do not read.
    Does nothing where the launcher started the script: it holds them already.
    """
    if any(getattr(getattr(claim.owner, claim.name), holding.MARK, False) for claim in arguments.claims()):
        return
    try:
        flags = read_flags(sys.argv[1:] if script_arguments is None else script_arguments)
        logging.getLogger("megatron_lynx").setLevel(flags.lynx_log.upper())
        held(Launch(flags, host_named(flags.lynx_host)))
    except LynxError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say(f"megatron-lynx: {error}")
        sys.exit(error.exit_status)


def held(launch: Launch) -> list[holding.Hook]:
    """The hooks of a launch on its host, in place. Raises `HookRefused` where it has not the functions for them."""
    claims = [*launch.host.claims(launch)]
    if refused := holding.verify(claims):
        raise HookRefused(f"this {launch.host.name} cannot be launched under a plan", refused)
    return holding.put_in_place(claims)


@contextmanager
def _as_its_own_process(command: Command, host: Host) -> Iterator[None]:
    """`sys.argv` and `sys.path[0]` as the script expects them."""
    argv, first = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [str(command.script), *host.arguments_of(command.arguments)], str(command.script.resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = argv, first
