"""Megatron's arguments.

Replaces              `add_megatron_arguments` of `megatron.training.arguments` (a global, read by `parse_args`).
Why                   our flags belong into `--help`, into what Megatron logs, and into the arguments that checkpoints record.
Calls the original    once per call. Of the parser that it returns, help texts that argparse cannot format are escaped: a per cent
                      sign in one of theirs ends `--help` of 0.18 and 0.19 in a traceback.
Holds                 nothing.
Passes through when   never: every parser gets our group, behind Megatron's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import wraps
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.launch.flags import add_flags


def printable(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The same parser, with help texts escaped where `--help` could not print them."""
    for action in parser._actions:
        if action.help is None:
            continue
        try:
            action.help % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")
    return parser


def claims() -> Iterator[Claim]:
    from megatron.training import arguments

    def hooked(original: Any) -> Any:
        @wraps(original)
        def add_megatron_arguments(parser: Any) -> Any:
            return printable(add_flags(original(parser)))

        return add_megatron_arguments

    yield Claim(arguments, "add_megatron_arguments", hooked, "declares Megatron's arguments")
