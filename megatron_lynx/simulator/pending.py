"""Weight gradients that a stage has deferred: which are pending, which run where, and which no longer fit.

    backward reaches a linear ──put──> [ oldest ... newest ] ──due──> its oldest runs in a wait, as the plan says
                                          │ more bytes than its chunk's bound
                                          └──> the chunk's oldest run at once, exposed; all that are left, in its last backward:
                                               behind it, or, where gradients are reduced meanwhile, each before its linear's own

As in the runtime, a wait takes one of each linear that the plan has put there, behind the replays: a forward's of any chunk's
linears, the receive of a gradient of the linears of the chunk whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lynx.cost.weight_gradient import WeightGradient
from megatron_lynx.timetable import Linear


class Entry(NamedTuple):
    """One weight gradient of one micro-batch that was deferred."""

    of: Linear
    chunk: int
    cost: WeightGradient


Pending = tuple[Entry, ...]
"""Entries, the oldest first."""


class Queue:
    """What is pending on a stage while a pass of one chunk runs. `bound_bytes`: what entries of that chunk may hold."""

    def __init__(self, chunk: int, bound_bytes: int, pending: Pending = ()) -> None:
        self.chunk = chunk
        self._bound_bytes = bound_bytes
        self._entries = list(pending)

    @property
    def pending(self) -> Pending:
        return tuple(self._entries)

    def put(self, entry: Entry) -> Iterator[Entry]:
        """Queues an entry; yields those that have to run for that, the oldest first."""
        left_bytes = self._bound_bytes - entry.cost.bytes
        own = [each for each in self._entries if each.chunk == self.chunk]
        held_bytes = sum(each.cost.bytes for each in own)
        self._entries.append(entry)
        for oldest in (*own, entry):
            if held_bytes <= left_bytes:
                return
            self._entries.remove(oldest)
            held_bytes -= oldest.cost.bytes
            yield oldest

    def due(self, linears: Sequence[Linear]) -> Iterator[Entry]:
        """Takes what runs in a wait: of each of these linears the oldest entry, if there is one."""
        for linear in linears:
            found = next((entry for entry in self._entries if entry.of == linear), None)
            if found is not None:
                self._entries.remove(found)
                yield found

    def take(self, of: Linear) -> Iterator[Entry]:
        """Takes everything that is left of one linear."""
        own = [entry for entry in self._entries if entry.of == of]
        self._entries = [entry for entry in self._entries if entry.of != of]
        yield from own

    def flush(self) -> Iterator[Entry]:
        """Takes everything that is left of the chunk."""
        own = [entry for entry in self._entries if entry.chunk == self.chunk]
        self._entries = [entry for entry in self._entries if entry.chunk != self.chunk]
        yield from own
