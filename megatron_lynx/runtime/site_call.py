"""A site as the recorder and the replayer see it: one call of one submodule, and what of it can be made alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.context import SiteState
from megatron_lynx.runtime.saved import detached, tensors_in


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

    def saved(self, nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The same tensors as `run` makes, from the nodes of a call of the whole site."""
        for node in nodes:
            if type(node).__name__ == self.node:
                saved = node.saved_tensors
                return tuple(saved[slot] for slot in self.slots(node))
        raise AssertionError(f"no {self.node} in what {self.item} is part of")


@dataclass(frozen=True, eq=False)
class Site:
    """One submodule that is a site of the plan, or one method of several that make it up; the same for all its calls."""

    name: str
    module: torch.nn.Module | None
    """None where it is no module of torch, and so owns no parameters."""
    forward: Callable[..., Any]
    """Its own code, without hooks."""
    first: FirstPart | None = None
    state: SiteState | None = None
    may_draw: bool = True
    """Whether it may draw random numbers at all. Norms and linears never do."""
    goes_on: bool = False
    """Whether another method of the same item comes behind it: then only that one reads what it returns."""

    @cached_property
    def owns_parameters(self) -> bool:
        return self.module is not None and next(self.module.parameters(), None) is not None

    @cached_property
    def segments(self) -> int:
        """How many segments of a half it takes: one for its first part, where that is an item of its own."""
        return 1 if self.first is None else 2


class SiteCall:
    """One submodule call of a half, about to be made."""

    __slots__ = ("_arguments", "args", "kwargs", "site")

    def __init__(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.site = site
        self.args = args
        self.kwargs = kwargs
        self._arguments: list[Tensor] | None = None

    def __call__(self) -> Any:
        return self.site.forward(*self.args, **self.kwargs)

    @property
    def arguments(self) -> list[Tensor]:
        """The tensors among them."""
        if self._arguments is None:
            self._arguments = tensors_in((self.args, self.kwargs) if self.kwargs else self.args)
        return self._arguments

    @property
    def lasting(self) -> Iterator[Tensor]:
        """Tensors that its nodes may save and that are nobody's activations."""
        if self.site.module is not None:
            yield from self.site.module.parameters()
        if self.site.state is not None:
            yield from self.site.state.lasting()

    def as_recorded(self, captured: Any) -> AbstractContextManager[None]:
        """Inside, what the site keeps from call to call is as it was when that was captured."""
        return nullcontext() if self.site.state is None else self.site.state.as_captured(captured)

    def without_graph(self) -> SiteCall:
        """The same call on arguments that do not lead back."""
        kwargs = map_nest(Tensor, detached, self.kwargs) if self.kwargs else self.kwargs
        return SiteCall(self.site, map_nest(Tensor, detached, self.args), kwargs)
