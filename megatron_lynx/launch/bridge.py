"""Megatron-Bridge: scripts that make a `ConfigContainer` and call `pretrain` or `finetune` of `megatron.bridge.training`.

Replaces              `initialize_megatron` of `setup`, `train` of `pretrain`, and `train_step` of `train`, all in
                      `megatron.bridge.training` (globals of these modules, read at each call).
Why                   after the first, torch.distributed is initialised and no model is built; the second is the training loop,
                      the third one step. Bridge's callbacks are not enough: `on_train_end` does not come if a loop fails.
Calls the original    once per call; a checked step with another `forward_backward_func`.
Holds                 the configuration; nothing per step.
Passes through when   no plan is given.

Bridge logs every exception that leaves `pretrain`, with a traceback. An error of ours is printed once instead, and the process
exits.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_lynx.apply.hook import Claim
from megatron_lynx.bridge_settings import BridgeSettings
from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.launch.ending import Ended
from megatron_lynx.launch.flags import PREFIX
from megatron_lynx.launch.hosts import Host, LaunchCallbacks, around
from megatron_lynx.launch.message import stop

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

    def __init__(self) -> None:
        self._settings: Settings | None = None

    def arguments_of(self, words: Sequence[str]) -> Sequence[str]:
        """The script's arguments without our flags, which its parser would refuse."""
        script_words, taken = [], False
        for word in words:
            ours = word.startswith(PREFIX)
            if not ours and not taken:
                script_words.append(word)
            taken = ours and "=" not in word
        return script_words

    def find(self, script: str) -> None:
        try:
            importlib.import_module(f"{TRAINING}.pretrain")
        except ModuleNotFoundError as missing:
            cause = f"no {missing.name} that it could import"
            todo = "install megatron-bridge and what it needs, or put its checkout's src folder on PYTHONPATH"
            problem = Problem(script, cause, f"{TRAINING} (Megatron-Bridge 0.5 or 0.6)", todo)
            raise ConfigError("the launch cannot find Megatron-Bridge's training", [problem]) from None

    def claims(self, callbacks: LaunchCallbacks) -> Iterator[Claim]:
        setup, pretrain, train = (importlib.import_module(f"{TRAINING}.{name}") for name in ("setup", "pretrain", "train"))

        @contextmanager
        def initialised(given: Mapping[str, Any]) -> Iterator[None]:
            yield
            _let_our_warnings_through()
            self._settings = Settings(given["cfg"])
            with _leaving_together():
                callbacks.prepare(self._settings)

        @contextmanager
        def loop(given: Mapping[str, Any]) -> Iterator[None]:
            assert self._settings is not None, "Bridge initialises before it trains"
            self._settings.state = given["global_state"]
            with _leaving_together(), callbacks.training(given["model"], given["optimizer"]):
                yield

        yield around(setup, "initialize_megatron", initialised, "starts torch.distributed")
        yield around(pretrain, "train", loop, "is the training loop")
        yield around(train, "train_step", callbacks.step, "is one step")

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
