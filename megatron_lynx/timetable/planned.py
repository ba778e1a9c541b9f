"""A plan's treatment of one half of one layer, with windows as addresses; and the waits of a half.

windows.mlp: {steady: fwd.mlp.0 until rotary then bwd.mlp.0, ...}  ──>  steady    Place(stretches, gather)
weight_gradients: {linear_fc2: [bwd.attention.0, ...]}             ──>  deferred  linear_fc2: its windows
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lynx.anatomy import HALVES, Half, Pass, Section
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, BackwardPhase, FrameKey, Window, WindowAddress


class Layout(NamedTuple):
    """Facts that decide the waits of a stage's halves."""

    collectives: bool = True
    """Whether there are several tensor-parallel ranks."""
    sequence_parallel: bool = False
    exchanging: Container[int] = ()
    """Layers whose expert exchanges are windows."""

    def waits(self, passing: Pass, layer: int, section: Section) -> int:
        """Number of waits of a half in one pass. Waits inside CUDA graphs cannot be used."""
        if section.captured:
            return 0
        if section.exchanges:
            return len(section.exchanges_of[passing]) if layer in self.exchanging else 0
        return len(section.collectives(passing, self.sequence_parallel)) if self.collectives else 0


class Place(NamedTuple):
    """Where a half is recomputed in one phase."""

    stretches: tuple[tuple[Window, str | None], ...] = ((ON_DEMAND, None),)
    """Windows, each with the item before which the recomputation stops there; None: it does not stop."""
    gather: Window | None = None
    """Window after which its input is gathered; None: it is not gathered."""


ON_DEMAND_PLACE = Place()


def ahead_to(section: Section, *, experts: bool, feeds: bool) -> str | None:
    """Return the item up to which a checkpointed half is recomputed during the backward of the layer above, if its layer begins
    ahead.

    `experts`: whether the layer has experts; then its dispatch is in flight meanwhile, else the reduction of its attention
    output. `feeds`: whether the next half's recomputation needs the half's output; an attention half without that begins nothing
    ahead.
    """
    if section.exchanges:
        return section.item("dispatch").name
    if not feeds:
        return None
    return section.residual if experts else section.row_parallel


def may_gather_ahead(section: Section, *, experts: bool, feeds: bool) -> bool:
    """Whether the input of such a half may be gathered ahead, before its output is reduced."""
    return feeds and not experts and bool(section.gathered and section.core)


@dataclass(frozen=True)
class PlannedHalf:
    """One half of one layer under a plan."""

    layer: int
    section: Section
    replay: Collection[str] = ()
    """Recomputed items, in forward order."""
    steady: Place = ON_DEMAND_PLACE
    cooldown: Place = ON_DEMAND_PLACE
    deferred: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """By linear in backward order, the waits of its delayed weight gradient: each takes the oldest pending one."""
    checkpoint: bool = False
    """Whether it keeps at most its input: all of `replay` is recomputed on demand, including communication. If its place is the
    first wait of its own backward, the part after its last communication runs there.
    """
    fed_behind: int = 0
    """Number of halves after this checkpointed one that keep no input, and get it from this one's recomputation."""
    ahead_to: str | None = None
    """Item up to which this checkpointed half is recomputed when backward enters the attention half of the layer above; the
    item's communication is in flight meanwhile. The half's last item: all of it has run. None: it begins when backward enters
    it.
    """
    gathers_ahead: bool = False
    """Whether its input is gathered ahead, before that."""

    @property
    def half(self) -> Half:
        return self.section.half

    @property
    def feeds(self) -> bool:
        return self.fed_behind > 0

    @property
    def key(self) -> FrameKey:
        return self.layer, self.section.half

    @property
    def leaves_under_way(self) -> str | None:
        """The item whose communication is in flight, if it begins ahead."""
        return None if self.ahead_to == self.section.residual else self.ahead_to

    @property
    def goes_on_behind(self) -> str | None:
        """The item of a checkpointed half after whose communication the rest is recomputed in the first wait of its own backward;
        None: all of it is recomputed when backward enters it.
        """
        return self.section.last_communicating if self.checkpoint and self.steady != ON_DEMAND_PLACE else None

    def place(self, phase: BackwardPhase) -> Place:
        return self.cooldown if phase == "cooldown" else self.steady

    @property
    def gathers(self) -> bool:
        """Whether the input of its recomputation is gathered once, so that backward need not gather it again. A checkpoint
        gathers it as a forward does, into shared memory: kept, it would be the checkpoint's largest block.
        """
        return self.section.column_parallel in self.replay and not self.checkpoint

    @property
    def ahead(self) -> int:
        """Number of halves before its own backward at which its recomputation or gather may begin: at least 1, and more if halves
        after it begin with its output. Windows in a forward or in the receive of a gradient do not count: no recomputation of
        a micro-batch runs between its forward and its backward.
        """
        place = _place_in_stage(self.key)
        served = [at.frame for at in self._windows() if isinstance(at, WindowAddress) and at.passing == "bwd"]
        if self.ahead_to is not None:
            served.append((self.layer + 1, HALVES[0]))
        return max((_place_in_stage(frame) + 1 - place for frame in served), default=1 + self.fed_behind)

    @property
    def begins_early(self) -> bool:
        """Whether any of its recomputation runs before its own backward begins: in a forward, or in the receive of a gradient."""
        return any(at == RECV_BACKWARD or (isinstance(at, WindowAddress) and at.passing == "fwd") for at in self._windows())

    def _windows(self) -> Iterator[Window | None]:
        """Windows in which it is recomputed, or after which its input is gathered."""
        for place in (self.steady, self.cooldown):
            yield from (window for window, _ in place.stretches)
            yield place.gather


def _place_in_stage(key: FrameKey) -> int:
    layer, half = key
    return len(HALVES) * layer + HALVES.index(half)
