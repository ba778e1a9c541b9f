"""The command to run instead of the one that was planned for.

torchrun ... pretrain_gpt.py ARGUMENTS  ─>  torchrun ... -m megatron_lynx.launch pretrain_gpt.py ARGUMENTS FLAGS --lynx-plan PLAN
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from megatron_lynx.launch_arguments.command_line import CommandLine

LAUNCHER = ("-m", "megatron_lynx.launch")
OURS = (LAUNCHER, ("-m", "megatron_lynx.testbed"))
"""What runs a script under a plan already."""


def to_paste(command: CommandLine, plan: str, flags: Sequence[str]) -> str:
    """`flags` (each as a shell reads it): what the plan needs and the launch has not. Without a script: what to add."""
    added = " ".join([*flags, "--lynx-plan", shlex.quote(plan)])
    if command.script is None:
        return f"add to the launch: {added}"
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.environment]
    launcher = command.launcher if command.launcher[-2:] in OURS else (*command.launcher, *LAUNCHER)
    words = shlex.join([*launcher, command.script, *without_plan(command.arguments)])
    return " ".join([*variables, words, added])


def without_plan(arguments: Sequence[str]) -> list[str]:
    """The arguments without a plan that was named before."""
    kept = list(arguments)
    while "--lynx-plan" in kept:
        at = kept.index("--lynx-plan")
        del kept[at : at + 2]
    return [word for word in kept if not word.startswith("--lynx-plan=")]
