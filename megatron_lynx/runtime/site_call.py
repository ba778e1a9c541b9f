"""A site as the recorder and the replayer see it: one call of one submodule, and what of it can be made alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.context import SiteState
from megatron_lynx.runtime.saved import detached, nodes_between, tensors_in


@dataclass(frozen=True)
class FirstPart:
    """What a site does first, where that is an item of its own: Transformer Engine makes a norm inside the linear behind it.

    argument ──> first part ──> rest of the site ──> output          one node of autograd, which saves both parts' tensors
                 run alone ──> the tensors it saves
    """

    item: str
    run: Callable[[Tensor], tuple[Tensor | None, ...]]
    """This part alone, of the site's argument: what the node saves of it, beginning with what the rest of the site reads."""
    node: str
    """The name of the node."""
    slots: Callable[[Any], tuple[int, ...]]
    """Where among what such a node saves the tensors of `run` are."""

    def saved(self, outputs: Any, arguments: Any) -> tuple[Tensor | None, ...]:
        """The same tensors as `run` makes, from a call of the whole site that ran."""
        for node in nodes_between(outputs, arguments):
            if type(node).__name__ == self.node:
                saved = node.saved_tensors
                return tuple(saved[slot] for slot in self.slots(node))
        raise AssertionError(f"no {self.node} in what {self.item} is part of")


@dataclass(frozen=True, eq=False)
class SiteCall:
    """One submodule call of a half, about to be made."""

    name: str
    module: torch.nn.Module
    forward: Callable[..., Any]
    """The module's own forward, without hooks."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    first: FirstPart | None = None
    state: SiteState | None = None

    def __call__(self) -> Any:
        return self.forward(*self.args, **self.kwargs)

    @property
    def arguments(self) -> list[Tensor]:
        return list(tensors_in((self.args, self.kwargs)))

    @property
    def owns_parameters(self) -> bool:
        return next(self.module.parameters(), None) is not None

    @property
    def lasting(self) -> Iterator[Tensor]:
        """Tensors that its nodes may save and that are nobody's activations."""
        yield from self.module.parameters()
        if self.state is not None:
            yield from self.state.lasting()

    def as_recorded(self, captured: Any) -> AbstractContextManager[None]:
        """Inside, what the site keeps from call to call is as it was when that was captured."""
        return nullcontext() if self.state is None else self.state.as_captured(captured)

    def without_graph(self) -> SiteCall:
        """The same call on arguments that do not lead back."""
        return replace(self, args=map_nest(Tensor, detached, self.args), kwargs=map_nest(Tensor, detached, self.kwargs))
