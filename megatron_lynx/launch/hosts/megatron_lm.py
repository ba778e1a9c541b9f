"""Megatron-LM: `pretrain_gpt.py` and its like, which read flags and call `pretrain` of `megatron.training`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from megatron_lynx.apply.hook import Claim
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch.hooks import arguments, initialisation, loop
from megatron_lynx.launch.hosts.host import Told


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
        yield from arguments.claims()
        yield from initialisation.claims(told)
        yield from loop.claims(told)

    def refused(self, args: Any) -> Iterator[Problem]:
        """Nothing beside what is asked of the model and of its flags."""
        return iter(())

    def writers(self) -> tuple[Any, Any]:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()

    def spoken(self, problem: Problem) -> Problem:
        """Problems are in Megatron-LM's words."""
        return problem
