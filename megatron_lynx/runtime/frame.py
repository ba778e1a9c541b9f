"""One layer half of one micro-batch: what it let go, and what is needed to regenerate it.

                       record                                replay                            backward
    half inputs ──> [0] code [1] site [2] code [3] ...    the same code, from the inputs      asks for (frame, key)
                     │        │                            kept sites return their memo        │
                     │        └ kept: memo of outputs      wanted tensors are collected        └ take: handed over once
                     └ saved tensors become handles        stops when none is wanted any more

Segments count sites and the stretches of code between them, so that a key `(segment, ordinal)` means the same tensor in the
record and in the replay although the replay skips kept sites. A frame is owned by the handles that autograd's graph holds:
when the graph goes, the frame goes (rule R8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lynx.items import Half
from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.refusals import asked_twice
from megatron_lynx.runtime.saved import detached, nodes_between, tensors_in
from megatron_lynx.runtime.state import SiteState
from megatron_lynx.runtime.window import FrameKey

if TYPE_CHECKING:
    from megatron_lynx.runtime.ledger import MicroBatch

Key = tuple[int, int]
"""(segment, ordinal within the segment)."""

Gather = Callable[[Tensor], tuple[Tensor, Any]]
"""Starts an all-gather of a tensor into a buffer of its own: (buffer, Work)."""


@dataclass(frozen=True)
class HalfPolicy:
    """What the plan says about one half of one layer, in the runtime's terms."""

    layer: int
    half: Half
    replay: frozenset[str]
    """Items whose saved tensors are let go."""
    code_behind: Mapping[str, str]
    """The item that the code behind a site belongs to; sites that are not listed own the code behind them."""
    row_parallel: str
    """The site whose call is never repeated, and whose output no replay needs."""
    gather_site: str | None = None
    """The replayed site whose first argument is gathered once (sequence parallelism)."""
    gather: Gather | None = None
    chunk: int = 0
    """Which of the stage's chunks the layer is in."""
    opaque: bool = False
    """Kept whole and not looked into: nothing of it is let go or leaves for the host, and no collective in it is a window."""

    @cached_property
    def keeping(self) -> HalfPolicy:
        """The same half where nothing is let go."""
        return replace(self, replay=frozenset(), gather_site=None, gather=None)

    @property
    def name(self) -> str:
        return f"{self.half}({self.layer})"


@dataclass(frozen=True)
class View:
    """A saved tensor that shares memory with an argument of its site: how to find it in the replayed argument."""

    argument: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, saved: Tensor, argument: int) -> View:
        return cls(argument, tuple(saved.size()), tuple(saved.stride()), int(saved.storage_offset()))

    def in_(self, argument: Tensor) -> Tensor:
        same = (tuple(argument.size()), tuple(argument.stride()), argument.storage_offset())
        if same == (self.size, self.stride, self.offset):
            return argument.detach()
        return argument.detach().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class Absent:
    """Stands for a tensor whose values no replay needs: expanded from one NaN, so that a use of it would show."""

    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Absent:
        return cls(tuple(tensor.size()), tensor.dtype, tensor.device, tensor.requires_grad)

    def made(self) -> Tensor:
        fill = float("nan") if self.dtype.is_floating_point else 0
        one = torch.full((), fill, dtype=self.dtype, device=self.device)
        return one.expand(self.size).requires_grad_(self.requires_grad)


@dataclass(frozen=True)
class Memo:
    """What a kept site returned (tensors, or `Absent` for those that are not needed), and the random state behind it where
    the site drew from it."""

    outputs: Any
    random: Any | None


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
        """The same tensors, of a call that ran."""
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

    @contextmanager
    def as_recorded(self, captured: Any) -> Iterator[None]:
        """Inside, the site's state is what it was."""
        with nullcontext() if self.state is None else self.state.as_captured(captured):
            yield

    def without_graph(self) -> SiteCall:
        """The same call on arguments that do not lead back."""
        return replace(self, args=map_nest(Tensor, detached, self.args), kwargs=map_nest(Tensor, detached, self.kwargs))


@dataclass(eq=False)
class Frame:
    """The record of one half. Filled by `record`, emptied by `replay` and `take`."""

    policy: HalfPolicy
    micro_batch: MicroBatch
    code: Callable[..., Any]
    """The half's own code, without hooks."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    random: Any = None
    surroundings: Any = ()
    site_states: dict[int, Any] = field(default_factory=dict)
    """By segment, of sites that a replay may run."""
    memos: dict[int, Memo] = field(default_factory=dict)
    views: dict[Key, View] = field(default_factory=dict)
    wanted: set[Key] = field(default_factory=set)
    found: dict[Key, Tensor] = field(default_factory=dict)
    replayed: bool = False
    let_go_bytes: int = 0
    gathering: tuple[Tensor, Any] | None = None
    """The gathered input and the Work that fills it, from its start to the end of this half's backward."""
    mark: Any = None
    """The hook in the graph that tells when backward reaches this half. It owns the frame, until the half's backward is over."""

    @property
    def key(self) -> FrameKey:
        return self.policy.layer, self.policy.half

    @property
    def lets_go(self) -> bool:
        """Whether its replay is to come: an empty one where gathering the input ahead of time made all that was wanted."""
        return not self.replayed and (bool(self.wanted) or self.gathering is not None)

    @property
    def waits(self) -> bool:
        """Whether a backward is to come that needs this frame."""
        return self.lets_go or bool(self.found)

    def keep(self, key: Key, tensor: Tensor) -> None:
        """A wanted tensor was regenerated."""
        if key in self.wanted:
            self.wanted.discard(key)
            self.found[key] = tensor.detach()

    def want(self, key: Key, size_bytes: int) -> Handle:
        """Instead of a tensor that is let go."""
        self.let_go_bytes += size_bytes
        self.wanted.add(key)
        return Handle(self, key)

    def left(self) -> None:
        """Its backward is over. The graph may live on: a router of experts keeps a tensor of its last call."""
        if self.mark is not None:
            self.mark.remove()
            self.mark = None

    def give_up_inputs(self) -> None:
        """The replay is over; nothing will run from the inputs again."""
        self.replayed = True
        self.inputs = self.random = None
        self.memos.clear()
        self.site_states.clear()
        self.views.clear()


@dataclass(frozen=True, eq=False)
class Handle:
    """What autograd holds instead of a tensor that was let go."""

    frame: Frame
    key: Key

    def take(self) -> Tensor:
        """The regenerated tensor, for the one backward that asks for it.

        Raises `ReplayError` when it is asked for again: it was dropped on purpose.
        """
        found = self.frame.found.pop(self.key, None)
        if found is None:
            raise asked_twice(self.frame.policy.name)
        return found
