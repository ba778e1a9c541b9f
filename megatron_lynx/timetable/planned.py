"""What a plan says of one half of one layer, with every window by its address; and which waits a half has.

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
    """What decides which waits the halves of a stage have."""

    collectives: bool = True
    """Whether tensor-parallel ranks communicate: there is more than one."""
    sequence_parallel: bool = False
    exchanging: Container[int] = ()
    """The layers of which experts' exchanges of tokens are windows."""

    def waits(self, passing: Pass, layer: int, section: Section) -> int:
        """How many waits a half has in one pass. Those in a captured graph are nobody's to use."""
        if section.captured:
            return 0
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


def ahead_to(section: Section, *, experts: bool, feeds: bool) -> str | None:
    """To which item a checkpointed half runs again while the layer above runs backward, where what its layer communicates begins
    ahead. `experts`: of the layer; its tokens travel then, to the experts, else what its attention returns is reduced. `feeds`:
    whether the half runs to its end for the half behind it; an attention half does nothing ahead where it does not."""
    if section.exchanges:
        return section.item("dispatch").name
    if not feeds:
        return None
    return section.residual if experts else section.row_parallel


def may_gather_ahead(section: Section, *, experts: bool, feeds: bool) -> bool:
    """Whether the input of such a half may be gathered ahead, before what it returns is reduced."""
    return feeds and not experts and bool(section.gathered and section.core)


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
    """Whether it keeps at most its input: `replay` is all that runs again, on demand, what communicates included. Its place may
    be the first wait of its own backward: what comes behind all that communicates runs there."""
    fed_behind: int = 0
    """Of a checkpointed half: how many halves behind it keep no input, and get it when this one runs again to its end."""
    ahead_to: str | None = None
    """Of a checkpointed half: the item to which it runs again where backward enters the attention half of the layer above. What
    that item communicates travels meanwhile; behind the half's last item all of it has run. None: it begins where backward enters
    it."""
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
        """The item whose communication travels meanwhile, if it begins ahead."""
        return None if self.ahead_to == self.section.residual else self.ahead_to

    @property
    def goes_on_behind(self) -> str | None:
        """Of a checkpointed half: the item behind whose communication the rest of it runs again in the first wait of its own
        backward. None: all of it runs again where backward enters it."""
        return self.section.last_communicating if self.checkpoint and self.steady != ON_DEMAND_PLACE else None

    def place(self, phase: BackwardPhase) -> Place:
        return self.cooldown if phase == "cooldown" else self.steady

    @property
    def gathers(self) -> bool:
        """Whether the input of its replay is gathered, once: then its backward does not gather it again. A checkpoint gathers it
        as a forward does, into memory that others use: kept, it would be the largest block of all that it makes."""
        return self.section.column_parallel in self.replay and not self.checkpoint

    @property
    def ahead(self) -> int:
        """How many halves before its own backward its replay may begin, windows and gathers alike; at least 1, and more where
        halves behind it begin with what it returns. What lies in a forward or in the receive of a gradient does not count:
        nothing of that comes between a forward and its own backward."""
        place = _place_in_stage(self.key)
        served = [at.frame for at in self._windows() if isinstance(at, WindowAddress) and at.passing == "bwd"]
        if self.ahead_to is not None:
            served.append((self.layer + 1, HALVES[0]))
        return max((_place_in_stage(frame) + 1 - place for frame in served), default=1 + self.fed_behind)

    @property
    def begins_early(self) -> bool:
        """Whether anything of its replay runs before its own backward begins: in a forward, or in the receive of a gradient."""
        return any(at == RECV_BACKWARD or (isinstance(at, WindowAddress) and at.passing == "fwd") for at in self._windows())

    def _windows(self) -> Iterator[Window | None]:
        """Every window in which something of its replay runs, or behind which its input is gathered."""
        for place in (self.steady, self.cooldown):
            yield from (window for window, _ in place.stretches)
            yield place.gather


def _place_in_stage(key: FrameKey) -> int:
    layer, half = key
    return len(HALVES) * layer + HALVES.index(half)
