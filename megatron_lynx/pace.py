"""When what one forward saves is on the host, and when it has to come back, where it goes half by half: by a pace.

    pace 2, halves 1 .. 6     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤├─ 4 ─┤├─ 5 ─┤├─ 6 ─┤     so many bytes are copied beside one half's forward
    to the host, 3 of each           └── 1 ───┤└── 2 ───┤└── 3 ───┤          1 is away behind half 3, 2 behind 4, 3 behind 6

A half comes back when backward comes to the half behind which it was away, so a backward holds no more than its forward did. What
is replayed in windows of halves before its own comes back for these. All that is fixed by bytes, never by a clock (rule R1).
"""

from __future__ import annotations

from typing import NamedTuple


class Turns(NamedTuple):
    """Of what one half saves, by half, counted from 1."""

    away: int
    """Behind which half's forward compute waits for its copy, and its originals are let go."""
    back: int
    """At the beginning of which half's backward its copy back begins."""


class Pace:
    """The copies of one micro-batch: `pace_bytes` beside each of its `halves`, in the order in which they leave."""

    def __init__(self, pace_bytes: int, halves: int) -> None:
        self.halves = halves
        self._pace_bytes = pace_bytes
        self._over = 0
        """When the copies so far are over, in bytes: a half is as long as the pace."""
        self._back = 0

    def stays(self, half: int) -> bool:
        """Whether nothing of a half leaves: of the last one, whose backward comes at once."""
        return half >= self.halves

    def leaves(self, half: int, size_bytes: int, ahead: int = 1) -> Turns:
        """So much of a half leaves when it is over. `ahead`: how many halves before its own backward it is needed, at least 1."""
        self._over = max(self._over, half * self._pace_bytes) + size_bytes
        away = min(self.halves, max(half + 1, -(-self._over // self._pace_bytes)))
        self._back = min(self.halves, max(self._back, away, half + ahead))
        return Turns(away, self._back)
