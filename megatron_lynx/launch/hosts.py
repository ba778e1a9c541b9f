"""The frameworks whose scripts a launch runs, and hooks on them.

MegatronLM: `pretrain_gpt.py` and other scripts that read flags and call `pretrain` of `megatron.training`.

Replaces              `add_megatron_arguments` of `megatron.training.arguments`, `_initialize_distributed` of
                      `megatron.training.initialize`, `train` and `train_step` of `megatron.training.training` (globals, read at
                      each call).
Why                   our flags appear in `--help`, in Megatron's log and in checkpoints; all ranks refuse a wrong plan together,
                      before a model is built; the plan is installed when the loop begins, and removed when it ends.
Calls the original    once per call, with the same arguments (they differ by release); a checked step with another
                      `forward_backward_func`.
Holds                 nothing.
Passes through when   no plan is given. A script that only evaluates (`--skip-train`) never reaches the loop.

Bridge: scripts that make a `ConfigContainer` and call `pretrain` or `finetune` of `megatron.bridge.training`.

Replaces              `initialize_megatron` of `setup`, `train` of `pretrain`, and `train_step` of `train`, all in
                      `megatron.bridge.training` (globals of these modules, read at each call).
Why                   as above. Bridge's callbacks are not enough: `on_train_end` does not come if a loop fails.
Calls the original    once per call; a checked step with another `forward_backward_func`.
Holds                 the configuration; nothing per step.
Passes through when   no plan is given.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any, Protocol

import torch.distributed as dist

from megatron_lynx.apply.hook import Claim, instead
from megatron_lynx.bridge_settings import BridgeSettings
from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.launch.ending import Ended
from megatron_lynx.launch.script import BRIDGE, add_flags, stop


class Host(Protocol):
    name: str

    def arguments_of(self, words: Sequence[str]) -> Sequence[str]:
        """The script's `sys.argv[1:]`. Megatron-LM's parser shows and records our flags."""
        return words

    loop: str
    """The module of its training loop."""
    needed: str

    def find(self, script: str) -> None:
        """Raises `ConfigError` if the framework cannot be imported as the script would import it."""
        try:
            import_module(self.loop)
        except ModuleNotFoundError as missing:
            todo = "install it, or put the checkout that the script belongs to on PYTHONPATH"
            problem = Problem(script, f"no {missing.name} that it could import", self.needed, todo)
            raise ConfigError(f"the launch cannot find the training of {self.name}", [problem]) from None

    def claims(self, launch: Any) -> Iterator[Claim]:
        """Hooks that call a `Launch` when distributed is initialised, around the training loop, and around a step.

        `prepare` gets arguments with Megatron-LM's names (`seq_length`, `tensor_model_parallel_size`, ...) that accept our flags
        and whose `curr_iteration` follows the loop; `step` gets those of a step, and may replace them.
        """
        ...

    def refused(self, args: Any) -> Iterable[Problem]:
        """Settings of the framework that no plan can run with, beyond those that the model and its flags are checked for."""
        return ()

    def writers(self) -> tuple[Any, Any]:
        """The writers of TensorBoard and W&B; None on most ranks."""
        ...

    def spoken(self, problem: Problem) -> Problem:
        """A problem in the words of the framework's users: flags, or settings of a configuration."""
        return problem


def around(module: Any, name: str, context: Callable[[dict[str, Any]], AbstractContextManager[None]], what: str) -> Claim:
    """A hook that runs a function inside `context`, which gets its arguments by name and may replace them."""

    def replaced_by(original: Callable[..., Any]) -> Any:
        signature = inspect.signature(original)

        def inside(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            with context(given.arguments):
                return original(*given.args, **given.kwargs)

        return instead(inside)(original)

    return Claim(module, name, replaced_by, what)


def host_named(name: str) -> Host:
    return Bridge() if name == BRIDGE else MegatronLM()


class MegatronLM(Host):
    name = "Megatron-LM"
    loop, needed = "megatron.training.training", "megatron.training (of Megatron-LM, or of a megatron-core wheel from 0.17)"

    def claims(self, launch: Any) -> Iterator[Claim]:
        arguments, initialize, training = (
            import_module(f"megatron.training.{name}") for name in ("arguments", "initialize", "training")
        )

        def declared(original: Any, parser: Any) -> Any:
            return add_flags(original(parser))

        @contextmanager
        def initialised(_: Mapping[str, Any]) -> Iterator[None]:
            yield
            launch.prepare(import_module("megatron.training.global_vars").get_args())

        yield Claim(arguments, "add_megatron_arguments", instead(declared), "declares Megatron's arguments")
        yield around(initialize, "_initialize_distributed", initialised, "starts torch.distributed")
        loop = around(
            training, "train", lambda given: launch.training(given["model"], given["optimizer"]), "is the training loop"
        )
        yield from (loop, around(training, "train_step", launch.step, "is one step"))

    def writers(self) -> tuple[Any, Any]:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        return get_tensorboard_writer(), get_wandb_writer()


TRAINING = "megatron.bridge.training"


class Settings(BridgeSettings):
    """A resolved container as Megatron-LM's arguments. Our flags are set on it."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.state: Any = None
        """The training loop's state, which counts the steps of this and earlier runs."""

    @property
    def curr_iteration(self) -> int:
        return 0 if self.state is None else int(self.state.train_state.step)

    iteration = curr_iteration

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (place := self.place(name)) is None:
            raise AttributeError(f"cfg has no {name}")
        return getattr(getattr(self.cfg, place[0]), place[1])


class Bridge(Host):
    name = "Megatron-Bridge"
    loop, needed = f"{TRAINING}.pretrain", f"{TRAINING} (Megatron-Bridge 0.5 or 0.6)"

    def __init__(self) -> None:
        self._settings: Settings | None = None

    def arguments_of(self, words: Sequence[str]) -> Sequence[str]:
        return add_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False)).parse_known_args(list(words))[1]

    def claims(self, launch: Any) -> Iterator[Claim]:
        setup, pretrain, train = (import_module(f"{TRAINING}.{name}") for name in ("setup", "pretrain", "train"))

        @contextmanager
        def initialised(given: Mapping[str, Any]) -> Iterator[None]:
            yield
            _let_our_warnings_through()
            self._settings = Settings(given["cfg"])
            with _leaving_together():
                launch.prepare(self._settings)

        @contextmanager
        def loop(given: Mapping[str, Any]) -> Iterator[None]:
            assert self._settings is not None, "Bridge initialises before it trains"
            self._settings.state = given["global_state"]
            with _leaving_together(), launch.training(given["model"], given["optimizer"]):
                yield

        yield around(setup, "initialize_megatron", initialised, "starts torch.distributed")
        yield around(pretrain, "train", loop, "is the training loop")
        yield around(train, "train_step", launch.step, "is one step")

    def refused(self, args: Any) -> Iterator[Problem]:
        yield from args.refused()
        if args.lynx_schedule != "flush":
            needed = "flush: Megatron-Bridge's loop saves and stops where a pipeline is empty"
            yield Problem("--lynx-schedule", args.lynx_schedule, needed, "launch without it")

    def writers(self) -> tuple[Any, Any]:
        assert self._settings is not None
        return self._settings.state.tensorboard_logger, self._settings.state.wandb_logger

    def spoken(self, problem: Problem) -> Problem:
        return problem if self._settings is None else self._settings.in_words(problem)


def _let_our_warnings_through() -> None:
    """Remove the filters of `cfg.logger.filter_warnings` from our loggers: it silences every logger."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] == "megatron_lynx" and isinstance(logger, logging.Logger):
            for log_filter in [one for one in logger.filters if getattr(one, "__name__", "") == "warning_filter"]:
                logger.removeFilter(log_filter)


@contextmanager
def _leaving_together() -> Iterator[None]:
    """Exit at once on an error that was printed: Bridge would log a failure, and abort groups that other ranks still use."""
    try:
        yield
    except Ended as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))
    except LynxError as error:
        if dist.is_initialized():
            stop(error)
        raise
