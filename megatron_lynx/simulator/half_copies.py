"""Copies of a micro-batch that is offloaded half by half within its own two passes.

    forward     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤ ...      backward   ... ├─ 3 ─┤├─ 2 ─┤├─ 1 ─┤
    to host           └─── 1 ───────┤          back           ├─── 1 ──────┘

A copy out starts when its half ends and the stream is free. Its bytes are freed after the half `turns.away`, where compute waits
for the copy. Its copy back starts at the half `turns.back` of the backward, where its bytes are allocated. A half, or a
recomputation of it ahead of time, waits if its copy is incomplete.

These copies share no stream with copies of other chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron_lynx.simulator.treated import Treated
from megatron_lynx.simulator.walk import Walk


class GoingOut:
    """Copies of a forward."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self._under_way: deque[tuple[int, float, int]] = deque()
        """(half after which compute waits for the copy, its end, bytes)."""

    def half_ends(self, walk: Walk, place: int, half: Treated) -> None:
        """Handle the end of a half. `place`: its index in its chunk, from 1."""
        while self._under_way and self._under_way[0][0] <= place:
            _, end_s, size_bytes = self._under_way.popleft()
            walk.wait(end_s)
            walk.hold(-size_bytes)
        if half.leaving is not None:
            start_s = max(walk.clock_s, self._free_s)
            self._free_s = start_s + half.leaving.seconds
            walk.copy("offload", half, start_s, self._free_s)
            self._under_way.append((half.leaving.turns.away, self._free_s, half.leaving.bytes))


class ComingBack:
    """Copies of a backward."""

    def __init__(self, treated: Sequence[Treated]) -> None:
        self._free_s = 0.0
        self._away = [half for half in treated if half.leaving is not None]
        self._back_s: dict[tuple[int, str], float] = {}

    def half_begins(self, walk: Walk, place: int, half: Treated) -> None:
        while self._away and (leaving := self._away[-1].leaving) is not None and leaving.turns.back >= place:
            coming = self._away.pop()
            walk.hold(leaving.bytes)
            start_s = max(walk.clock_s, self._free_s)
            self._free_s = self._back_s[coming.layer, coming.half] = start_s + leaving.seconds
            walk.copy("reload", coming, start_s, self._free_s)
        self.needed(walk, half)

    def ahead(self, walk: Walk, replayed: Sequence[Treated]) -> None:
        """Wait for the copies of halves whose recomputation is about to run."""
        for half in replayed:
            self.needed(walk, half)

    def needed(self, walk: Walk, half: Treated) -> None:
        walk.wait(self._back_s.get((half.layer, half.half), 0.0))
