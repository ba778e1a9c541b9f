"""One micro-batch whose own backward follows its forward at once: what it keeps leaves and comes back half by half.

    forward     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤ ... ├─ n ─┤      backward   ├─ n ─┤ ... ├─ 3 ─┤├─ 2 ─┤├─ 1 ─┤
    to host           └[1] 1 ────────[2]  [4]          back                   └[3] 1 ─────────┘[5]

 [1] a half is over: what it saved leaves, as far as the plan's bytes go; what it put out leaves with the next half, if at all
 [2] a half is over behind which it is away, at the plan's pace (`pace`): compute waits for its copy, and the originals are let go
 [3] backward comes to the same half, or to one a little before, for a replay ahead of time: the copy back begins
 [4] the last half stays, and so does what is made when the plan's bytes are reached: what is needed first stays
 [5] a node asks its handle, as for any parcel

All of it lies between the beginning of a forward and the end of the backward behind it, so no message meets a copy.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.errors import OffloadError
from megatron_lynx.pace import Pace
from megatron_lynx.runtime.offload.copier import Copier, failed
from megatron_lynx.runtime.offload.host_memory import HostPool
from megatron_lynx.runtime.offload.parcel import Parcel, fetch, send
from megatron_lynx.runtime.offload.shipment import Shipment

PoolOf = Callable[[int], HostPool]
"""The host memory of the how-manieth half of a chunk: each half's blocks have sizes of their own."""


class _Gone(NamedTuple):
    """What of one half left together, and at which half's turn it is let go, or comes back."""

    turn: int
    parcels: list[weakref.ref[Parcel]]

    def alive(self) -> list[Parcel]:
        return [parcel for known in self.parcels if (parcel := known()) is not None]


class HalfByHalf:
    """The copies of one such micro-batch of one chunk."""

    def __init__(self, shipment: Shipment, pool_of: PoolOf, out: Copier) -> None:
        first_layer, layers = shipment.policy.layers
        assert shipment.policy.pace_bytes is not None
        self.shipment = shipment
        self._first_layer = first_layer
        self._pace = Pace(shipment.policy.pace_bytes, len(HALVES) * layers)
        self._left_bytes = shipment.policy.bytes
        self._pool_of = pool_of
        self._out = out
        self._leaving: deque[_Gone] = deque()
        self._away: list[_Gone] = []

    def half_begins(self, key: FrameKey) -> Shipment | None:
        """Where what this half saves goes; None where all of it stays."""
        self.shipment.half = self._place(key)
        return None if self._left_bytes <= 0 or self._pace.stays(self.shipment.half) else self.shipment

    def half_ends(self, key: FrameKey, outputs: Any, ahead: int) -> None:
        """A half's forward is over. `ahead`: how many halves before its own backward a replay of it may begin."""
        place = self._place(key)
        self._release(place)
        if not self._pace.stays(place):
            self._depart(place, self.shipment.take_made(outputs), ahead)

    def forward_ends(self) -> None:
        """Nothing leaves any more, and all that left is let go."""
        self._release(self._pace.halves)
        self.shipment.forward_is_over()

    def backward_reaches(self, key: FrameKey) -> None:
        """What has its turn comes back, the last one first."""
        place = self._place(key)
        while self._away and self._away[-1].turn >= place:
            if on_host := [parcel for parcel in reversed(self._away.pop().alive()) if parcel.on_host]:
                fetch(on_host)  # [3]

    def _depart(self, place: int, made: list[Parcel], ahead: int) -> None:
        chosen: list[tuple[Parcel, int]] = []
        for parcel in made:
            if (size := min(self._left_bytes, parcel.size_bytes)) > 0:
                chosen.append((parcel, size))
                self._left_bytes -= size
        if not chosen:
            return
        sizes = [size for _, size in chosen]
        turns = self._pace.leaves(place, sum(sizes), ahead)
        try:
            blocks = self._pool_of(place).lend(sizes)
            send([(parcel, size, block) for (parcel, size), block in zip(chosen, blocks, strict=True)], self._out)  # [1]
        except OffloadError:
            raise
        except Exception as error:
            raise failed("offload", self.shipment.owner, sum(sizes), error) from error
        parcels = [weakref.ref(parcel) for parcel, _ in chosen]
        self._leaving.append(_Gone(turns.away, parcels))
        self._away.append(_Gone(turns.back, parcels))

    def _release(self, place: int) -> None:
        while self._leaving and self._leaving[0].turn <= place:
            for parcel in self._leaving.popleft().alive():
                parcel.release(self._out)  # [2]

    def _place(self, key: FrameKey) -> int:
        """The how-manieth half of its chunk it is, counted from 1."""
        layer, half = key
        return len(HALVES) * (layer - self._first_layer) + HALVES.index(half) + 1
