"""What a plan says of one half of one layer, with every window by its address; and which waits a half has.

windows.mlp: {steady: fwd.mlp.0 until rotary then bwd.mlp.0, ...}  ──>  steady    Place(stretches, gather)
weight_gradients: {linear_fc2: [bwd.attention.0, ...]}             ──>  deferred  linear_fc2: its windows
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_lynx.anatomy import HALVES, Half, Pass, Section
from megatron_lynx.anatomy.address import ON_DEMAND, BackwardPhase, FrameKey, Window, WindowAddress


class Layout(NamedTuple):
    """What decides which waits the halves of a stage have."""

    collectives: bool = True
    """Whether tensor-parallel ranks communicate: there is more than one."""
    sequence_parallel: bool = False
    exchanging: Container[int] = ()
    """The layers of which experts' exchanges of tokens are windows."""

    def waits(self, passing: Pass, layer: int, section: Section) -> int:
        """How many waits a half has in one pass."""
        if section.exchanges:
            return len(section.exchanges_of[passing]) if layer in self.exchanging else 0
        return len(section.collectives(passing, self.sequence_parallel)) if self.collectives else 0


class Place(NamedTuple):
    """Where a half is recomputed in one phase."""

    stretches: tuple[tuple[Window, str | None], ...] = ((ON_DEMAND, None),)
    """The windows, each with the item before which the replay stops there; None: it does not stop."""
    gather: Window | None = None
    """Behind which window the replay's input is gathered; None: nothing is gathered."""


ON_DEMAND_PLACE = Place()


@dataclass(frozen=True)
class PlannedHalf:
    """One half of one layer under a plan."""

    layer: int
    section: Section
    """What fills the half."""
    replay: Collection[str] = ()
    """The items that run again, in the order in which the layer runs them."""
    steady: Place = ON_DEMAND_PLACE
    cooldown: Place = ON_DEMAND_PLACE
    deferred: Mapping[str, tuple[Window, ...]] = field(default_factory=dict)
    """The linears that defer their weight gradients, in the order in which backward reaches them, and the waits of each: the
    first that comes takes the oldest one."""
    checkpoint: bool = False
    """Whether it keeps at most its input: `replay` is all that runs again, on demand, what communicates included."""
    feeds: bool = False
    """Of a checkpointed half: whether it runs again to its end, because the half behind it keeps no input and gets it so."""

    @property
    def half(self) -> Half:
        return self.section.half

    @property
    def key(self) -> FrameKey:
        return self.layer, self.section.half

    def place(self, phase: BackwardPhase) -> Place:
        return self.cooldown if phase == "cooldown" else self.steady

    @property
    def gathers(self) -> bool:
        """Whether the input of its replay is gathered, once: then its backward does not gather it again. A checkpoint gathers it
        as a forward does, into memory that others use: kept, it would be the largest block of all that it makes."""
        return self.section.column_parallel in self.replay and not self.checkpoint

    @property
    def ahead(self) -> int:
        """How many halves before its own backward its replay may begin, windows and gathers alike; at least 1, and 2 where the half
        behind it begins with what it returns. What lies in a forward or in the receive of a gradient does not count: nothing of
        that comes between a forward and its own backward."""
        place = _place_in_stage(self.key)
        served = (at.frame for at in self._windows() if isinstance(at, WindowAddress) and at.passing == "bwd")
        return max((_place_in_stage(frame) + 1 - place for frame in served), default=1 + self.feeds)

    def _windows(self) -> Iterator[Window | None]:
        """Every window in which something of its replay runs, or behind which its input is gathered."""
        for place in (self.steady, self.cooldown):
            yield from (window for window, _ in place.stretches)
            yield place.gather


def _place_in_stage(key: FrameKey) -> int:
    layer, half = key
    return len(HALVES) * layer + HALVES.index(half)
