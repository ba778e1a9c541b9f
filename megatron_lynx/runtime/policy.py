"""Treatment of one half of one layer. The runtime knows policies, not plans."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.surroundings import NO_HOOKS, ForwardHooks
from megatron_lynx.timetable import PlannedHalf

Gather = Callable[[Tensor], tuple[Tensor, Any]]
"""Starts an all-gather of a tensor. Returns (its own buffer, `Work`)."""


@dataclass(frozen=True)
class ChunkPolicy:
    """Treatment of one chunk of the stage."""

    ahead_depth: int = 0
    """How many halves of a micro-batch may be recomputed before backward reaches them (rule R4)."""
    whole: Container[int] = ()
    """Indices of micro-batches that keep everything."""
    delayed: frozenset[tuple[int, str]] = frozenset()
    """(layer, item) of each linear whose weight gradients are delayed."""
    in_drain: frozenset[tuple[int, str]] = frozenset()
    """Those of them that delay in cool-down and in the chunk's last backward only."""
    most_delayed_bytes: int = 0
    read_after_send: bool = False
    """Whether its weights' gradients are read only after that of its input is sent."""


@dataclass(frozen=True)
class HalfPolicy(PlannedHalf):
    """A half under a plan, in a run."""

    recompute: frozenset[str] = frozenset()
    """Items whose saved tensors are dropped."""
    gather_site: str | None = None
    """The recomputed site whose first argument is gathered once (sequence parallelism)."""
    gather: Gather | None = None
    keeps_gathered: frozenset[str] = frozenset()
    """Recomputed sites whose gathered argument is small, and kept (sequence parallelism)."""
    chunk: int = 0
    """Index of the layer's chunk in the stage."""
    may_draw: Callable[[], bool] = lambda: True
    """Whether the half may draw random numbers in the call that begins now."""
    stays: bool = False
    """Whether its kept tensors stay on the device although its chunk offloads."""
    midway: str | None = None
    """The site before whose backward something begins."""
    passed_over: bool = False
    """Whether it is kept on the device and its collectives have no tasks, so that it needs no record."""
    below_passed_over: bool = False
    """Whether the half before it is passed over."""
    fed_by: FrameKey | None = None
    """The half before it, if that feeds this one."""
    marked: tuple[object, ...] = ()
    """Objects on which each call of its code leaves attributes; a recomputation restores them (rule R13)."""
    allowed_load: float | None = None
    """Load of experts (rows over balanced rows) that the plan's bytes allow, averaged over the halves in flight. Set if the half
    falls back at more (`record.too_many`): its first linears and activation are recomputed, too."""
    hooks: ForwardHooks = field(default=NO_HOOKS, compare=False)
    """Hooks of the modules that it calls, if anything is recomputed."""

    @cached_property
    def keeping(self) -> HalfPolicy:
        without = replace(self, recompute=frozenset(), gather_site=None, gather=None, keeps_gathered=frozenset())
        return replace(without, checkpoint=False, fed_behind=0, fed_by=None)

    @cached_property
    def fallen_back(self) -> HalfPolicy:
        return replace(self, recompute=self.recompute | self.section.on_rows, allowed_load=None)

    @cached_property
    def may_recompute(self) -> bool:
        return bool(self.recompute) or self.allowed_load is not None

    def goes_out(self, offloading: Container[int]) -> bool:
        """Return whether its kept tensors may go to the host. `offloading`: chunks that offload."""
        return self.chunk in offloading and not self.stays

    @cached_property
    def name(self) -> str:
        return f"{self.half}({self.layer})"
