"""The copies of one micro-batch that goes half by half, within its own two passes: one half after the other.

    forward     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤ ...      backward   ... ├─ 3 ─┤├─ 2 ─┤├─ 1 ─┤
    to host           └─[1] 1 ──────[2]        back           [3]── 1 ─────┘      [4]

 [1] a half is over, and the stream is free
 [2] behind the half whose turn it is compute waits for the copy; then its bytes are gone
 [3] at the beginning of the same half's backward its bytes are taken again, and the copy back begins when the stream is free
 [4] a half that finds its copy incomplete waits, and so does a replay of it ahead of time

They share no stream here with copies of other chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron_lynx.simulator.treated import Treated
from megatron_lynx.simulator.walk import Walk


class GoingOut:
    """Those of a forward."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self._under_way: deque[tuple[int, float, int]] = deque()
        """Behind which half each is waited for, when it is over, its bytes."""

    def half_ends(self, walk: Walk, place: int, half: Treated) -> None:
        """The how-manieth half of its chunk is over, counted from 1."""
        while self._under_way and self._under_way[0][0] <= place:
            _, end_s, size_bytes = self._under_way.popleft()
            walk.wait(end_s)  # [2]
            walk.hold(-size_bytes)
        if half.leaving is not None:
            start_s = max(walk.clock_s, self._free_s)  # [1]
            self._free_s = start_s + half.leaving.seconds
            walk.copy("offload", half, start_s, self._free_s)
            self._under_way.append((half.leaving.turns.away, self._free_s, half.leaving.bytes))


class ComingBack:
    """Those of a backward."""

    def __init__(self, treated: Sequence[Treated]) -> None:
        self._free_s = 0.0
        self._away = [half for half in treated if half.leaving is not None]
        self._back_s: dict[tuple[int, str], float] = {}

    def half_begins(self, walk: Walk, place: int, half: Treated) -> None:
        while self._away and (leaving := self._away[-1].leaving) is not None and leaving.turns.back >= place:
            coming = self._away.pop()
            walk.hold(leaving.bytes)
            start_s = max(walk.clock_s, self._free_s)  # [3]
            self._free_s = self._back_s[coming.layer, coming.half] = start_s + leaving.seconds
            walk.copy("reload", coming, start_s, self._free_s)
        self.needed(walk, half)

    def ahead(self, walk: Walk, replayed: Sequence[Treated]) -> None:
        """Parts of their replays are about to run."""
        for half in replayed:
            self.needed(walk, half)

    def needed(self, walk: Walk, half: Treated) -> None:
        walk.wait(self._back_s.get((half.layer, half.half), 0.0))  # [4]
