"""The events of one pass of a stage: which half is entered, which wait comes, what runs in it and what behind it.

    Pass      HalfPass   mlp(4)         [halves that run again first, what is left of its replay, on demand; what begins ahead]
                │          Wait bwd.mlp.0@4        │ Replay attention(4) until rotary │ wait │ Gather mlp(3)
                │          Wait bwd.mlp.1@4        │ weight gradient of linear_fc2(4) │ wait │
              HalfPass   attention(4)
                           Wait bwd.attention.0@4  │ Replay attention(4), the rest    │ wait │ ...

In a wait the replays come first, in the order in which backward needs them, then weight gradients, each if one of its linear is
pending, then the wait proper, and behind it what has to communicate. What is held from an event on follows from its names: of a
half that is replayed until an item, whatever its items before that one made. What a checkpoint communicates may begin ahead: its
replay then stops behind an item whose exchange is under way, and goes on where backward enters its half.

              HalfPass   attention(5)   [...; mlp(4) to its dispatch, which travels]          its waits
              HalfPass   mlp(4)         [waits for the dispatch, the rest of its replay]      its waits

Of a half of experts the rest may run in the first wait of its own backward, for the gradient of what experts returned:

              HalfPass   mlp(4)         [attention(4) whole; mlp(4) to its dispatch, which travels]
                           Wait bwd.mlp.0@4        │ waits for the dispatch; mlp(4), the rest │ wait │

An attention may gather its input ahead, too, before what it returns is reduced, which is of the same ranks:

              HalfPass   attention(5)   Wait bwd.attention.0 │ attention(4) to its first linear, whose input is gathered meanwhile
                           at its core  [waits for the gather; attention(4) to its reduction, which travels]
              HalfPass   mlp(4)         [waits for the reduction; the rest of both replays]   its waits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron_lynx.anatomy import Half
from megatron_lynx.anatomy.address import ON_DEMAND, FrameKey, Window, WindowAddress


class Linear(NamedTuple):
    """A linear of a layer, of experts the item that stands for theirs."""

    layer: int
    half: Half
    name: str


class Replay(NamedTuple):
    """Recompute a half, or the part of it between two items."""

    half: FrameKey
    since: str | None = None
    """The item before which the part before this one stopped. None: this is the first part."""
    until: str | None = None
    """The item before which it stops. None: it does not."""
    gathered: Window | None = None
    """Of a first part whose input is gathered: behind which window it was; `on_demand`: right before this."""

    whole: bool = False
    """Whether it runs to the half's end: what the half returns is the input of the half behind it, which kept none."""
    communicates: bool = False
    """Whether collectives and exchanges inside run again with it, as in a forward: in no window, and on all ranks at once."""
    starts: str | None = None
    """The item at which it stops, while what that item communicates is under way: behind it, or before it, where its input is
    gathered."""
    started: str | None = None
    """The item at which the part before this one stopped: what that communicates is waited for first."""

    @property
    def gathered_ahead(self) -> bool:
        return self.gathered is not None and self.gathered != ON_DEMAND


class Wait(NamedTuple):
    """One wait for communication, and what the plan has put into it."""

    window: Window
    replays: tuple[Replay, ...] = ()
    weight_gradients: tuple[Linear, ...] = ()
    """Of each the oldest that is pending runs, of whichever micro-batch."""
    gathers: tuple[FrameKey, ...] = ()
    """The halves whose input is gathered when the wait is over: what comes before it runs again, and the gather begins."""
    over: bool = False
    """Whether it is over before it begins, and no window: what it waits for was gathered for a replay."""
    ahead: tuple[Replay, ...] = ()
    """As `HalfPass.ahead`, when the wait is over: where what travels would hold up what is waited for here."""

    @property
    def busy(self) -> bool:
        """Whether anything runs in it or behind it."""
        return bool(self.replays or self.weight_gradients or self.gathers or self.ahead)


class HalfPass(NamedTuple):
    """One half in one pass."""

    half: FrameKey
    waits: tuple[Wait, ...]
    on_demand: Replay | None = None
    """In a backward: what of its replay no window does."""
    gathered: Window | None = None
    """In a backward: behind which window its input was gathered ahead of time; None where it was not."""
    first: tuple[Replay, ...] = ()
    """In a backward: halves before this one that run again whole, in the order of a forward, right before its own replay: what
    the last of them returns is its input. What they make for their own backwards is held from here on."""
    ahead: tuple[Replay, ...] = ()
    """In a backward: what of the layer below runs again right here, behind this half's own replay, in the order of a forward. The
    last of them leaves what it communicates under way."""
    midway: tuple[Replay, ...] = ()
    """As `ahead`, where its backward comes to the core attention: what was begun before has travelled beside what lies behind
    that, and what begins now travels beside the rest."""


@dataclass(frozen=True)
class Pass:
    """One pass of a chunk: its halves, in the order in which it goes through them."""

    halves: tuple[HalfPass, ...] = ()

    @cached_property
    def busy(self) -> Mapping[Window, Wait]:
        """Its waits in which anything runs, by address."""
        return {wait.window: wait for half in self.halves for wait in half.waits if wait.busy}

    @cached_property
    def hides(self) -> bool:
        """Whether any replay runs in it, or any input is gathered."""
        return any(wait.replays or wait.gathers for wait in self.busy.values())

    @cached_property
    def busy_halves(self) -> frozenset[FrameKey]:
        """The halves that have such a wait, or at which something begins ahead."""
        waiting = (window.frame for window in self.busy if isinstance(window, WindowAddress))
        return frozenset((*waiting, *self.ahead, *self.midway))

    @cached_property
    def ahead(self) -> Mapping[FrameKey, tuple[Replay, ...]]:
        """What begins ahead, by the half at which it does."""
        return {half.half: half.ahead for half in self.halves if half.ahead}

    @cached_property
    def going_on(self) -> Mapping[FrameKey, str]:
        """The checkpointed halves of which a part runs in a wait, and the item behind which that is."""
        replays = (replay for wait in self.busy.values() for replay in wait.replays)
        return {replay.half: replay.started for replay in replays if replay.started is not None}

    @cached_property
    def midway(self) -> Mapping[FrameKey, tuple[Replay, ...]]:
        """What begins in the midst of a half, by the half in which it does."""
        return {half.half: half.midway for half in self.halves if half.midway}
