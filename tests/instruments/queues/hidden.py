"""What the wait for a message hides: a replay of the logs with the sender stopped before it has made what is awaited.

    rank 0   ... forward  [send]  replayed half  <wait for the gradient>  backward
    rank 1   ... backward, and no further                                          does the half run all the same?

If it does, it runs while rank 1 still computes. If not, something holds it up until the message is there, and its window is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.instruments.queues.log import COMPUTE, Communicator, Event, Given, Kernel, Log, Messages, Wait
from tests.instruments.queues.replay import Stopped, replay


def hides(logs: Sequence[Log], hardware_queues: int, rank: int, kernel: str) -> bool:
    """Whether a rank's kernel runs before the message is made for which compute waits behind it."""
    posted = _awaited_behind(logs[rank], kernel)
    (received,) = (message for message in posted.messages if message.direction == "receive")
    places = list(_places(logs[rank], posted.communicator, "receive", received.peer))
    number = next(number for number, place in enumerate(places) if logs[rank].entries[place] is posted)
    sent_at = list(_places(logs[received.peer], posted.communicator, "send", rank))[number]
    made = _made_before(logs[received.peer], sent_at)
    return kernel in replay(logs, hardware_queues, Stopped(received.peer, made)).ran[rank]


def _awaited_behind(log: Log, kernel: str) -> Messages:
    """The messages for which compute waits next when it has run a kernel."""
    entries = iter(log.entries)
    assert any(entry == Kernel(COMPUTE, kernel) for entry in entries), f"rank {log.rank} has no kernel {kernel}"
    event = next(entry.event for entry in entries if isinstance(entry, Wait) and entry.stream == COMPUTE)
    given = [entry for entry in log.entries if isinstance(entry, Given) and entry.stream == event.stream]
    posted = given[event.things - 1]
    assert isinstance(posted, Messages), f"behind {kernel} compute waits for {posted}"
    return posted


def _places(log: Log, on: Communicator, direction: str, peer: int) -> Iterator[int]:
    """Where a log posts messages of one direction with one peer on a communicator, in order."""
    for place, entry in enumerate(log.entries):
        if isinstance(entry, Messages) and entry.communicator == on:
            yield from (place for message in entry.messages if (message.direction, message.peer) == (direction, peer))


def _made_before(log: Log, place: int) -> Event:
    """The point of compute behind which something was posted."""
    wait = log.entries[place - 1]
    assert isinstance(wait, Wait), f"{log.entries[place]} comes behind nothing"
    return wait.event
