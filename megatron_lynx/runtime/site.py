"""A site as the recorder and the replayer see it: one call of one submodule, and the shortcut through a half that sites are.

A shortcut is a replay that runs the half's first sites, one after another, and not the code around them:

    half(hidden, ...) ──> norm(hidden) ──> linear_qkv(normed) ──> ...       let go: what the norm saved, and linear_qkv's input
                            └ step 0: handed what the half was                └ step 1: handed what step 0 returned

The code between a half's sites is Python that runs again in every replay, up to the last site of which anything was let go. Where
nothing in between was let go, and each of these sites is handed one of the half's own arguments or what one before it returned,
as it is, they can be called without that code. A half's first call learns whether that is so; each later one looks again, by the
identity of tensors.
"""

from __future__ import annotations

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
    """The places of the tensors that `run` makes among those that such a node saves."""

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
            yield from memory_of(self.site.module.parameters())
        if self.site.state is not None:
            yield from self.site.state.lasting()

    def as_recorded(self, captured: Any) -> AbstractContextManager[None]:
        """Inside, what the site keeps from call to call is as it was when that was captured."""
        return nullcontext() if self.site.state is None else self.site.state.as_captured(captured)

    def without_graph(self) -> SiteCall:
        """The same call on arguments that have no graph behind them."""
        kwargs = map_nest(Tensor, detached, self.kwargs) if self.kwargs else self.kwargs
        return SiteCall(self.site, map_nest(Tensor, detached, self.args), kwargs)


class ShortcutStep(NamedTuple):
    """One site of a shortcut."""

    site: Site
    segment: int
    source: int
    """Which of the values at hand when it is called it is handed: first the half's arguments, then what each step returned."""


class ShortcutFinder:
    """Follows the first sites of one call of a half, for as long as steps of a shortcut can lead there."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any], most: int | None = None) -> None:
        """`most`: how many steps are wanted, where that is known."""
        self._values = [*args, *kwargs.values()]
        self._steps: list[ShortcutStep] = []
        self._left = most

    def called(self, call: SiteCall, segment: int) -> None:
        """A site is called."""
        if self._left == 0:
            return
        given = call.args[0] if len(call.args) == 1 and not call.kwargs else None
        for source, value in enumerate(self._values):
            if value is given and given is not None:
                self._steps.append(ShortcutStep(call.site, segment, source))
                self._left = None if self._left is None else self._left - 1
                break
        else:
            self._left = 0
        if self._left == 0:
            self._values.clear()  # nobody is kept longer for it

    def returned(self, outputs: Any) -> None:
        """What that site returned."""
        if self._left != 0:
            self._values.append(first_in(Tensor, outputs))

    def steps(self, lets_go: Collection[int]) -> tuple[ShortcutStep, ...]:
        """The steps that reach all segments in which anything was let go; none where only the half's code reaches them."""
        wanted, found = set(lets_go), []
        for step in self._steps:
            if not wanted:
                break
            found.append(step)
            wanted.difference_update(range(step.segment - step.site.segments + 1, step.segment + 1))
        return () if wanted else tuple(found)
