"""Which of two things comes first, told by vector clocks: an actor's clock counts what it comes behind of each actor's doings.

    compute     1 ── 2 ──┬─ 3 ──────────────────┬── 4        the 4th comes behind the copy {compute 4, offload 1};
                 point   │                point │            the 3rd does not {compute 3}, nor does the copy come behind it
    offload              └─ 1 (a copy) ─────────┘

The host issues everything: what it has waited for comes before all that it issues later, on any stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

Point = Mapping[str, int]
"""How far each actor has come, as far as the one knows whose point it is."""


class Order:
    """The clocks of all actors. An actor is a stream, or a communicator, whose doings come one behind the other."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._host: dict[str, int] = {}

    def next(self, actor: str) -> int:
        """The actor is given one more thing, by the host. Its number."""
        clock = self._clocks[actor]
        _join(clock, self._host)
        clock[actor] = clock.get(actor, 0) + 1
        return clock[actor]

    def point(self, actor: str) -> Point:
        """Behind everything that the actor was given so far."""
        return dict(self._clocks[actor])

    def comes_behind(self, actor: str, point: Point) -> None:
        """What the actor is given from now on comes behind the point."""
        _join(self._clocks[actor], point)

    def host_comes_behind(self, point: Point) -> None:
        """What the host issues from now on comes behind the point."""
        _join(self._host, point)

    def host_knows(self, point: Point) -> bool:
        """Whether what the host issues comes behind the point."""
        return all(self._host.get(actor, 0) >= number for actor, number in point.items())

    def host_comes_behind_all(self) -> None:
        for clock in self._clocks.values():
            _join(self._host, clock)

    def knows(self, actor: str, other: str, number: int) -> bool:
        """Whether what the actor is given next comes behind the thing with this number of another actor."""
        return max(self._clocks[actor].get(other, 0), self._host.get(other, 0)) >= number


def _join(clock: dict[str, int], other: Point) -> None:
    for actor, number in other.items():
        if number > clock.get(actor, 0):
            clock[actor] = number
