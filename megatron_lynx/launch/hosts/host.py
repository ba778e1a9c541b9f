"""The interface of a framework whose training script a launch runs.

    find(script)         the framework can be imported as the script would import it
    claims(told)         hooks that call the launch       distributed is initialised   told.prepare(arguments)
                                                          the loop begins, ends        told.training(model, optimizer)
                                                          a step begins, ends          told.step(arguments of the step)
    refused(arguments)   settings of the framework that no plan can run with
    writers()            where the framework logs
    spoken(problem)      a problem in the words of the framework's users: flags, or settings of a configuration

`arguments` is an object with the names of Megatron-LM's `args` (`seq_length`, `tensor_model_parallel_size`, ...), on which our
flags may be set, and whose `curr_iteration` follows the loop. A step's arguments have `forward_backward_func` and `optimizer`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, Protocol

from megatron_lynx.apply.hook import Claim
from megatron_lynx.errors import Problem


class Told(Protocol):
    """The part of a launch that a host's hooks call."""

    def prepare(self, args: Any) -> None: ...

    def training(self, model: Any, optimizer: Any) -> AbstractContextManager[None]: ...

    def step(self, arguments: dict[str, Any]) -> AbstractContextManager[None]: ...


def around_step(told: Told) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a hook for a host's function of one step: it runs inside `told.step`, which may change its arguments."""

    def hooked(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            with told.step(given.arguments):
                return original(*given.args, **given.kwargs)

        return train_step

    return hooked


class Host(Protocol):
    """One framework."""

    name: str
    """Its name in messages."""

    def arguments_of(self, words: Sequence[str]) -> Sequence[str]:
        """The script's `sys.argv[1:]`, with our flags or without."""
        ...

    def find(self, script: str) -> None:
        """Raises `ConfigError` if the framework cannot be imported."""
        ...

    def claims(self, told: Told) -> Iterator[Claim]: ...

    def refused(self, args: Any) -> Iterator[Problem]: ...

    def writers(self) -> tuple[Any, Any]:
        """The writers of TensorBoard and W&B; None on most ranks."""
        ...

    def spoken(self, problem: Problem) -> Problem: ...
