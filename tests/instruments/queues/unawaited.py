"""Finds collectives and receives that neither compute nor the host waits for: their result may be used before it is there.

A wait for a later message of the same stream does not count: what was computed between would not have waited.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tests.instruments.queues.log import COMPUTE, Collective, Communication, Event, Given, HostWait, Log, Messages, Wait


def unawaited(log: Log) -> list[str]:
    """Each of them, with its place in the order of its communicator."""
    awaited = set(_awaited(log))
    return [f"rank {log.rank}: {what}, number {event.things // 2}" for what, event in _results(log) if event not in awaited]


def _awaited(log: Log) -> Iterator[Event]:
    for entry in log.entries:
        if isinstance(entry, Wait) and entry.stream == COMPUTE:
            yield entry.event
        elif isinstance(entry, HostWait):
            yield from entry.events


def _results(log: Log) -> Iterator[tuple[Communication, Event]]:
    """What gives compute something to read, and when it is over."""
    given: Counter[str] = Counter()
    for entry in log.entries:
        if not isinstance(entry, Given):
            continue
        given[entry.stream] += 1
        if isinstance(entry, Collective) or (isinstance(entry, Messages) and entry.receives):
            yield entry, Event(entry.stream, given[entry.stream])
