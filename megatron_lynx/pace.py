"""When the activations of a micro-batch are on the host, and when they come back: fixed by bytes, never by a clock (rule R1).

    pace 2, halves 1 .. 6     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤├─ 4 ─┤├─ 5 ─┤├─ 6 ─┤     bytes copied beside one half's forward
    to the host, 3 of each           └── 1 ───┤└── 2 ───┤└── 3 ───┤          1 is away after half 3, 2 after 4, 3 after 6

A half comes back when backward reaches the half after which it was away, so a backward holds no more than its forward did. A half
that is recomputed in windows of halves above it comes back for these.

Without a pace a micro-batch moves as a whole: it leaves after its forward, is away when the stage's next such forward ends, and
comes back before its backward.
"""

from __future__ import annotations

from typing import NamedTuple

AFTERWARDS = 1 << 30
"""The place of what happens after a micro-batch's forward: after that of every half."""


class Turns(NamedTuple):
    """Places in the order of halves, from 1, for the activations of one half."""

    away: int
    """The half after whose forward compute waits for the copy to the host, and the originals are freed."""
    back: int
    """The half at the beginning of whose backward the copy back begins."""


class Pace:
    """The copies of one micro-batch: `pace_bytes` beside each of its `halves`, in the order in which they leave; None: as a
    whole."""

    def __init__(self, pace_bytes: int | None, halves: int) -> None:
        self.halves = halves
        self.whole = pace_bytes is None
        self._pace_bytes = pace_bytes or 0
        self._over = 0
        """When the copies so far are over, in bytes: a half is as long as the pace."""
        self._back = 0

    def stays(self, half: int) -> bool:
        """Whether nothing of a half leaves: the last one's backward comes at once."""
        return half >= self.halves and not self.whole

    def leaves(self, half: int, size_bytes: int, ahead: int = 1) -> Turns:
        """The turns of so many bytes of a half that is over. `ahead`: how many halves before its own backward it is needed, at
        least 1."""
        if self.whole:
            return Turns(AFTERWARDS, AFTERWARDS)
        self._over = max(self._over, half * self._pace_bytes) + size_bytes
        away = min(self.halves, max(half + 1, -(-self._over // self._pace_bytes)))
        self._back = min(self.halves, max(self._back, away, half + ahead))
        return Turns(away, self._back)
