"""What a launch asks of the framework whose training script it runs: of nothing else does it know which one that is.

    found(script)        the framework can be imported from where the script would import it
    claims(told)         hooks that tell the launch       all ranks can talk     told.prepare(arguments)
                                                          the loop begins, ends  told.training(model, optimizer)
                                                          a step begins, ends    told.step(arguments of the step)
    refused(arguments)   settings of the framework's own that no plan can be held under
    writers()            where the framework logs
    spoken(problem)      a problem in the words of the framework's users: flags, or settings of a configuration

`arguments` are what Megatron-LM calls so: an object with its names (`seq_length`, `tensor_model_parallel_size`, ...), on which
our own flags may be set, and whose `curr_iteration` follows the loop. A step's arguments have `forward_backward_func` and
`optimizer`.
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
    """A launch, as far as hooks on a host tell it something."""

    def prepare(self, args: Any) -> None: ...

    def training(self, model: Any, optimizer: Any) -> AbstractContextManager[None]: ...

    def step(self, arguments: dict[str, Any]) -> AbstractContextManager[None]: ...


def around_step(told: Told) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What replaces a host's function of one step: the same, inside `told.step`, which may change its arguments."""

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
    """How messages call it."""

    def arguments_of(self, words: Sequence[str]) -> Sequence[str]:
        """What the script is to find in `sys.argv` of the words behind its name: with our flags or without."""
        ...

    def find(self, script: str) -> None:
        """Raises `ConfigError` where the framework cannot be imported."""
        ...

    def claims(self, told: Told) -> Iterator[Claim]: ...

    def refused(self, args: Any) -> Iterator[Problem]: ...

    def writers(self) -> tuple[Any, Any]:
        """For TensorBoard and W&B; on most ranks there are none."""
        ...

    def spoken(self, problem: Problem) -> Problem: ...
