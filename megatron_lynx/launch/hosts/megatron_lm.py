"""Megatron-LM: `pretrain_gpt.py` and other scripts that read flags and call `pretrain` of `megatron.training`.

Replaces              `add_megatron_arguments` of `megatron.training.arguments` (a global, read by `parse_args`);
                      `_initialize_distributed` of `megatron.training.initialize` (a global, read by `initialize_megatron`);
                      `train` and `train_step` of `megatron.training.training` (globals, read by `pretrain` and by `train`).
Why                   our flags appear in `--help`, in Megatron's log, and in the arguments that checkpoints record; all ranks
                      refuse a wrong plan together as soon as they can communicate, before a model is built; the plan is
                      installed when the loop begins, with the model built, wrapped and loaded, and removed when it ends, so
                      that evaluation, saving and a second `pretrain` use Megatron's own objects.
Calls the original    once per call, with the same arguments (they differ by release); a checked step with another
                      `forward_backward_func`. Help texts that argparse cannot format are escaped: a per cent sign in one of
                      Megatron's makes `--help` of 0.18 and 0.19 fail.
Holds                 nothing.
Passes through when   no plan is given. A script that only evaluates (`--skip-train`) never reaches the loop.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import wraps
from importlib import import_module
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch.flags import add_flags
from megatron_lynx.launch.hosts.host import Told, around_step


class MegatronLM:
    name = "Megatron-LM"

    def arguments_of(self, words: Sequence[str]) -> Sequence[str]:
        """All of them: Megatron's parser shows and records our flags."""
        return words

    def find(self, script: str) -> None:
        try:
            import_module("megatron.training.training")
        except ModuleNotFoundError as missing:
            if (missing.name or "").split(".")[0] != "megatron":
                raise
            found = f"no {missing.name} that it could import"
            needed = "megatron.training (of Megatron-LM, or of a megatron-core wheel from 0.17)"
            todo = "put the Megatron-LM checkout that the script belongs to on PYTHONPATH"
            raise ConfigError("the launch cannot find Megatron's training", [Problem(script, found, needed, todo)]) from None

    def claims(self, told: Told) -> Iterator[Claim]:
        yield from arguments_claims()
        yield from initialisation_claims(told)
        yield from loop_claims(told)

    def refused(self, args: Any) -> Iterator[Problem]:
        """The checks of flags and model are enough."""
        return iter(())

    def writers(self) -> tuple[Any, Any]:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()

    def spoken(self, problem: Problem) -> Problem:
        """Problems are in Megatron-LM's words already."""
        return problem


def printable(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Escape help texts that `--help` could not print, and return the parser."""
    for action in parser._actions:
        if action.help is None:
            continue
        try:
            action.help % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")
    return parser


def arguments_claims() -> Iterator[Claim]:
    from megatron.training import arguments

    def hooked(original: Any) -> Any:
        @wraps(original)
        def add_megatron_arguments(parser: Any) -> Any:
            return printable(add_flags(original(parser)))

        return add_megatron_arguments

    yield Claim(arguments, "add_megatron_arguments", hooked, "declares Megatron's arguments")


def initialisation_claims(told: Told) -> Iterator[Claim]:
    from megatron.training import initialize
    from megatron.training.global_vars import get_args

    def hooked(original: Any) -> Any:
        @wraps(original)
        def _initialize_distributed(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            told.prepare(get_args())
            return result

        return _initialize_distributed

    yield Claim(initialize, "_initialize_distributed", hooked, "starts torch.distributed")


def loop_claims(told: Told) -> Iterator[Claim]:
    from megatron.training import training

    def around_loop(original: Any) -> Any:
        @wraps(original)
        def train(forward_step_func: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with told.training(model, optimizer):
                return original(forward_step_func, model, optimizer, *args, **kwargs)

        return train

    yield Claim(training, "train", around_loop, "is the training loop")
    yield Claim(training, "train_step", around_step(told), "is one step")
