"""Megatron-LM: `pretrain_gpt.py` and its like, which read flags and call `pretrain` of `megatron.training`.

Replaces              `add_megatron_arguments` of `megatron.training.arguments` (a global, read by `parse_args`);
                      `_initialize_distributed` of `megatron.training.initialize` (a global, read by `initialize_megatron`);
                      `train` and `train_step` of `megatron.training.training` (globals, read by `pretrain` and by `train`).
Why                   our flags belong into `--help`, into what Megatron logs, and into the arguments that checkpoints record;
                      a plan that is wrong is refused by all ranks together as soon as they can talk, before a model is built;
                      when the loop begins the model is built, wrapped and loaded, and no step has run: the plan is installed
                      there, and removed when the loop ends, so that evaluating, saving and a second `pretrain` have Megatron's
                      own objects.
Calls the original    once per call, with the arguments as they came (they differ by release); a checked step with another
                      `forward_backward_func`. Of the parser, help texts that argparse cannot format are escaped: a per cent sign
                      in one of Megatron's ends `--help` of 0.18 and 0.19 in a traceback.
Holds                 nothing; the installation is the launch's.
Passes through when   no plan was requested. A script that only evaluates (`--skip-train`) never gets to the loop.
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
        """All: Megatron's parser shows our flags, and records them."""
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
        """Nothing beside what is asked of the model and of its flags."""
        return iter(())

    def writers(self) -> tuple[Any, Any]:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()

    def spoken(self, problem: Problem) -> Problem:
        """Problems are in Megatron-LM's words."""
        return problem


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
