"""One micro-batch that leaves and comes back half by half: its copies lie within its own forward and its own backward.

    forward     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤ ... ├─ n ─┤      backward   ├─ n ─┤ ... ├─ 3 ─┤├─ 2 ─┤├─ 1 ─┤
    to host           └[1] 1 ────────[2]  [4]          back                   └[3] 1 ─────────┘[5]

 [1] a half is over: what it saved leaves, as far as the plan's bytes go; what it put out leaves with the next half, if at all
 [2] a half is over behind which it is away, at the plan's pace (`pace`): compute waits for its copy, and the originals are let go
 [3] backward comes to the same half, or to one a little before, for a replay ahead of time: the copy back begins
 [4] the last half stays, and so does what is made when the plan's bytes are reached: what is needed first stays
 [5] a node asks its handle, as for whatever was offloaded

So no copy outlasts its pass, and none meets a message. Between the two passes, whether others come there or none, all that left
is away; of a half whose replay begins before the backward does, nothing leaves. On one stage whose exchanges of experts are
overlapped the next micro-batch's forward runs in turns with this backward, and sends meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.pace import Pace
from megatron_lynx.runtime.offload.copier import Copier
from megatron_lynx.runtime.offload.group import OffloadGroup, Sent, fetch, send, within
from megatron_lynx.runtime.offload.host_memory import HostPool

PoolOf = Callable[[int], HostPool]
"""The host memory of the how-manieth half of a chunk: each half's blocks have sizes of their own."""


class HalfByHalf:
    """The copies of one such micro-batch of one chunk."""

    def __init__(self, group: OffloadGroup, pool_of: PoolOf, out: Copier) -> None:
        first_layer, layers = group.policy.layers
        assert group.policy.pace_bytes is not None
        self.group = group
        self._first_layer = first_layer
        self._pace = Pace(group.policy.pace_bytes, len(HALVES) * layers)
        self._left_bytes = group.policy.bytes
        self._pool_of = pool_of
        self._out = out
        self._leaving: deque[tuple[int, Sent]] = deque()
        """Copies out, each with the half behind which its originals are let go."""
        self._away: list[tuple[int, Sent]] = []
        """Copies out, each with the half at whose backward they come back."""

    def half_begins(self, key: FrameKey) -> OffloadGroup | None:
        """Where what this half saves goes; None where all of it stays."""
        self.group.half = self._place(key)
        return None if self._left_bytes <= 0 or self._pace.stays(self.group.half) else self.group

    def half_ends(self, key: FrameKey, outputs: Any, ahead: int) -> None:
        """A half's forward is over. `ahead`: how many halves before its own backward a replay of it may begin."""
        place = self._place(key)
        self._release(place)
        if self._pace.stays(place):
            return
        chosen = [one for one in within(self._left_bytes, self.group.take_made(outputs)) if one[1] > 0]
        size_bytes = sum(size for _, size in chosen)
        if chosen:
            self._left_bytes -= size_bytes
            turns = self._pace.leaves(place, size_bytes, ahead)
            for sent in send(self.group, chosen, self._pool_of(place), self._out):  # [1]
                self._leaving.append((turns.away, sent))
                self._away.append((turns.back, sent))

    def forward_ends(self) -> None:
        """Nothing leaves any more, and all that left is let go."""
        self._release(self._pace.halves)
        self.group.forward_is_over()

    def backward_reaches(self, key: FrameKey) -> None:
        """A half's backward begins: start bringing back whatever has its turn there, the last one first."""
        while self._away and self._away[-1][0] >= self._place(key):
            fetch(self._away.pop()[1].alive())  # [3]

    def _release(self, place: int) -> None:
        while self._leaving and self._leaving[0][0] <= place:
            for storage in self._leaving.popleft()[1].alive():
                storage.release(self._out)  # [2]

    def _place(self, key: FrameKey) -> int:
        """The how-manieth half of its chunk it is, counted from 1."""
        layer, half = key
        return len(HALVES) * (layer - self._first_layer) + HALVES.index(half) + 1
