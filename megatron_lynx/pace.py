"""When a micro-batch's activations are on the host: fixed by bytes, never by a clock (rule R1).

    pace 2, halves 1 .. 6     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤├─ 4 ─┤├─ 5 ─┤├─ 6 ─┤     bytes copied during one half's forward
    to the host, 3 of each           └── 1 ───┤└── 2 ───┤└── 3 ───┤          1 is away after half 3, 2 after 4, 3 after 6

The copy back of a half begins when backward reaches the half after which it was away, or earlier for a half that is recomputed in
windows of halves above it. So a backward needs no more memory than its forward.

Without a pace a micro-batch moves as a whole: it is copied after its forward, is away when the stage's next such forward ends,
and returns before its backward.
"""

from __future__ import annotations

from typing import NamedTuple

AFTERWARDS = 1 << 30
"""Place after the forward of every half."""


class Turns(NamedTuple):
    """Places in the order of halves, from 1, for the activations of one half."""

    away: int
    """The half after whose forward compute waits for the copy to the host, and the originals are freed."""
    back: int
    """The half at the beginning of whose backward the copy back begins."""


class Pace:
    """The copies of one micro-batch: `pace_bytes` during each of its `halves`, in order of their forward; None: as a whole."""

    def __init__(self, pace_bytes: int | None, halves: int) -> None:
        self.halves = halves
        self.whole = pace_bytes is None
        self._pace_bytes = pace_bytes or 0
        self._over = 0
        """End of the copies so far, in bytes: a half is as long as the pace."""
        self._back = 0

    def stays(self, half: int) -> bool:
        """Whether a half stays on the device, because its backward follows directly."""
        return half >= self.halves and not self.whole

    def leaves(self, half: int, size_bytes: int, ahead: int = 1) -> Turns:
        """The turns of a half's `size_bytes` after its forward. `ahead`: number of halves before its own backward at which it is
        needed, at least 1."""
        if self.whole:
            return Turns(AFTERWARDS, AFTERWARDS)
        self._over = max(self._over, half * self._pace_bytes) + size_bytes
        away = min(self.halves, max(half + 1, -(-self._over // self._pace_bytes)))
        self._back = min(self.halves, max(self._back, away, half + ahead))
        return Turns(away, self._back)
