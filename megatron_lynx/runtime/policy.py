"""What becomes of one half of one layer, as the plan says it: the runtime knows no plan, only policies."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.forward_hooks import NO_HOOKS, ForwardHooks

Gather = Callable[[Tensor], tuple[Tensor, Any]]
"""Starts an all-gather of a tensor into a buffer of its own: (buffer, Work)."""


@dataclass(frozen=True)
class DeferralPolicy:
    """Of one chunk: whose weight gradients are deferred, and how much they may hold meanwhile."""

    linears: frozenset[tuple[int, str]] = frozenset()
    """(layer, item) of each linear that defers."""
    most_bytes: int = 0


@dataclass(frozen=True)
class ChunkPolicy:
    """What becomes of one chunk of the stage."""

    ahead_depth: int = 0
    """How many halves of a micro-batch may be regenerated before backward reaches them (rule R4)."""
    whole: Container[int] = ()
    """Micro-batches of a step that keep everything, whatever the halves' policies say."""
    deferral: DeferralPolicy = field(default_factory=DeferralPolicy)


@dataclass(frozen=True)
class Beyond:
    """What a half of experts does with a micro-batch of which its rank gets more rows than the plan's bytes hold for."""

    hold: float
    """The load that they hold for, on average over what the stage holds at once (`runtime.loads`)."""
    replay: frozenset[str]
    """Items that then run again as well, where backward enters the half."""
    rule: frozenset[str]
    """What the half replays otherwise, as the plan says: a micro-batch with more tokens than planned keeps everything, and
    the ranks that share out experts need not have as many."""


@dataclass(frozen=True)
class HalfPolicy:
    """There is one for each half of each layer; `apply.assignment` makes it from a rule of the plan."""

    layer: int
    section: Section
    """What fills the half."""
    replay: frozenset[str]
    """Items whose saved tensors are let go."""
    gather_site: str | None = None
    """The replayed site whose first argument is gathered once (sequence parallelism)."""
    gather: Gather | None = None
    keeps_gathered: frozenset[str] = frozenset()
    """The replayed sites whose gathered argument is small, and kept (sequence parallelism)."""
    chunk: int = 0
    """Which of the stage's chunks the layer is in."""
    may_draw: Callable[[], bool] = lambda: True
    """Whether the half may draw random numbers in the call that begins now."""
    stays: bool = False
    """Whether nothing of what it keeps goes to the host, although what others of its chunk keep does."""
    ahead: int = 1
    """How many halves before its own backward a replay of it may begin, and asks for what it needs; 1 where none does."""
    midway: str | None = None
    """The site before whose backward something begins."""
    passed_over: bool = False
    """Whether nothing ever happens in it: it is kept whole, on the device, and none of its collectives has a task."""
    below_passed_over: bool = False
    """Whether that holds of the half before it, whose backward comes next."""
    checkpoint: bool = False
    """Whether it is checkpointed: what its replay communicates is communicated, and so it runs where backward enters the half."""
    feeds: bool = False
    """Of a checkpointed half: whether the half behind it keeps no input, but has this one run again to its end."""
    fed_by: FrameKey | None = None
    """The half before it, where that is so."""
    marked: tuple[object, ...] = ()
    """Objects on which each call leaves what only its own code reads: a replay leaves them as they were (rule R13)."""
    beyond: Beyond | None = None
    """None: it does the same whatever comes."""
    hooks: ForwardHooks = field(default=NO_HOOKS, compare=False)
    """Of the modules that the half calls; given where anything is replayed."""

    @cached_property
    def keeping(self) -> HalfPolicy:
        """The same half where nothing is let go."""
        without = replace(self, replay=frozenset(), gather_site=None, gather=None, keeps_gathered=frozenset())
        return replace(without, checkpoint=False, feeds=False, fed_by=None)

    @cached_property
    def fallen_back(self) -> HalfPolicy:
        """The same half where more rows come than its plan holds for: nothing is kept of them but themselves."""
        assert self.beyond is not None, f"{self.name} never falls back"
        return replace(self, replay=self.replay | self.beyond.replay, beyond=None)

    @cached_property
    def may_replay(self) -> bool:
        """Whether a call of it may be replayed at all."""
        return bool(self.replay) or self.beyond is not None

    def goes_out(self, offloading: Container[int]) -> bool:
        """Whether what it keeps may go to the host. `offloading`: chunks that send something there."""
        return self.chunk in offloading and not self.stays

    @cached_property
    def half(self) -> Half:
        return self.section.half

    @cached_property
    def key(self) -> FrameKey:
        return self.layer, self.half

    @cached_property
    def name(self) -> str:
        return f"{self.half}({self.layer})"
