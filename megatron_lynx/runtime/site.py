"""A site: one call of one submodule; and the shortcut through a half's first sites.

A shortcut recomputes the half's first sites one after another, without the code around them. It needs that no tensor of the code
in between was dropped, and that each site is called with one of the half's arguments or an earlier site's output, unchanged. The
half's first call learns whether that holds; later calls check it by tensor identity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.nest import first_in, map_nest
from megatron_lynx.runtime.saved import detached, memory_of, tensors_in
from megatron_lynx.runtime.surroundings import SiteState


@dataclass(frozen=True)
class FirstPart:
    """The first part of a site, where it is an item of the plan: TE computes a norm inside the linear that follows.

    argument ──> first part ──> rest of the site ──> output          one autograd node saves both parts' tensors
                 run alone ──> the tensors it saves
    """

    item: str
    run: Callable[[Tensor], tuple[Tensor | None, ...]]
    """Runs this part alone on the site's argument. Returns the tensors that the node saves of it, the rest's input first."""
    node: str
    slots: Callable[[Any], tuple[int, ...]]
    """Indices of `run`'s tensors among the node's saved tensors."""

    def saved(self, nodes: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """Return the tensors that `run` makes, from the nodes of a call of the whole site. Empty if it has no node: its weights
        are frozen, and its input needs no gradient."""
        for node in nodes:
            if type(node).__name__ == self.node:
                saved = node.saved_tensors
                return tuple(saved[slot] for slot in self.slots(node))
        return ()


@dataclass(frozen=True, eq=False)
class Site:
    """One submodule that is a site of the plan, or one method of several that make it up."""

    name: str
    module: torch.nn.Module | None
    """Its torch module, if it is one; another site owns no parameters."""
    forward: Callable[..., Any]
    first: FirstPart | None = None
    state: SiteState | None = None
    may_draw: bool = True
    has_next_method: bool = False
    """Whether another method of the same item follows, the only reader of its output."""

    @cached_property
    def owns_parameters(self) -> bool:
        return self.module is not None and next(self.module.parameters(), None) is not None

    @cached_property
    def segments(self) -> int:
        """Segments of a half that it takes: 2 if its first part is an item."""
        return 1 if self.first is None else 2


class SiteCall:
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
        if self._arguments is None:
            self._arguments = tensors_in((self.args, self.kwargs) if self.kwargs else self.args)
        return self._arguments

    @property
    def lasting(self) -> Iterator[Tensor]:
        """Tensors that its nodes may save and that are not activations."""
        if self.site.module is not None:
            yield from memory_of(self.site.module.parameters())
        if self.site.state is not None:
            yield from self.site.state.lasting()

    def as_recorded(self, captured: Any) -> AbstractContextManager[None]:
        """Restore the site's state (FP8 scales) as captured, inside the context."""
        return nullcontext() if self.site.state is None else self.site.state.as_captured(captured)

    def without_graph(self) -> SiteCall:
        kwargs = map_nest(Tensor, detached, self.kwargs) if self.kwargs else self.kwargs
        return SiteCall(self.site, map_nest(Tensor, detached, self.args), kwargs)


class ShortcutStep(NamedTuple):
    site: Site
    segment: int
    source: int
    """Index of its input among the half's arguments, followed by the outputs of the steps before."""


class ShortcutFinder:
    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], step_count: int | None = None) -> None:
        """`step_count`: how many steps to look for, if known."""
        self._values = [*args, *kwargs.values()]
        self._steps: list[ShortcutStep] = []
        self._left = math.inf if step_count is None else step_count

    def called(self, call: SiteCall, segment: int) -> None:
        if not self._left:
            return
        given = call.args[0] if len(call.args) == 1 and not call.kwargs else None
        for source, value in enumerate(self._values):
            if value is given and given is not None:
                self._steps.append(ShortcutStep(call.site, segment, source))
                self._left -= 1
                break
        else:
            self._left = 0
        if not self._left:
            self._values.clear()

    def returned(self, outputs: Any) -> None:
        if self._left:
            self._values.append(first_in(Tensor, outputs))

    def steps(self, lets_go: Collection[int]) -> tuple[ShortcutStep, ...]:
        """Return the steps that reach all segments with dropped tensors; empty if only the half's code reaches them."""
        wanted, shortcut = set(lets_go), []
        for step in self._steps:
            if not wanted:
                break
            shortcut.append(step)
            wanted.difference_update(range(step.segment - step.site.segments + 1, step.segment + 1))
        return () if wanted else tuple(shortcut)
