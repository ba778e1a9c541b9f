"""What can be said of the logs of all ranks without a replay: collectives that are not in one order, messages that do not fit.

For every two ranks, the collectives of communicators that both belong to have to be the same, in the same order. With NCCL
another order is a hang or, on one communicator, sums of things that do not belong together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations, zip_longest

from tests.instruments.queues.log import Collective, Communicator, Log, Messages

Lane = tuple[Communicator, int, int]
"""Messages from one rank to another one, on one communicator."""


def differences(logs: Sequence[Log]) -> list[str]:
    """The first difference of every two ranks' collectives, and of the messages of each lane."""
    return [*_orders(logs), *_messages(logs)]


def _orders(logs: Sequence[Log]) -> Iterator[str]:
    for one, other in combinations(logs, 2):
        both = {one.rank, other.rank}
        for number, (here, there) in enumerate(zip_longest(_collectives(one, both), _collectives(other, both))):
            if here != there:
                found = f"rank {one.rank} has {here or 'none'}, rank {other.rank} {there or 'none'}"
                yield f"collective {number} of both ranks {one.rank} and {other.rank}: {found}"
                break


def _collectives(log: Log, ranks: set[int]) -> list[Collective]:
    return [entry for entry in log.entries if isinstance(entry, Collective) and ranks <= set(entry.communicator.members)]


def _messages(logs: Sequence[Log]) -> Iterator[str]:
    sent, received = _lanes(logs, "send"), _lanes(logs, "receive")
    for lane in sorted(sent.keys() | received.keys()):
        communicator, sender, receiver = lane
        for number, (here, there) in enumerate(zip_longest(sent[lane], received[lane])):
            if here != there:
                found = f"{_counted(here)} sent, {_counted(there)} expected"
                yield f"message {number} from rank {sender} to {receiver} on {communicator}: {found}"
                break


def _lanes(logs: Sequence[Log], direction: str) -> defaultdict[Lane, list[int]]:
    """The elements of the messages of each lane, as their senders or their receivers have them."""
    lanes: defaultdict[Lane, list[int]] = defaultdict(list)
    for log in logs:
        for posted in (entry for entry in log.entries if isinstance(entry, Messages)):
            for message in posted.messages:
                if message.direction == direction:
                    ends = (log.rank, message.peer) if direction == "send" else (message.peer, log.rank)
                    lanes[(posted.communicator, *ends)].append(message.elements)
    return lanes


def _counted(elements: int | None) -> str:
    return "nothing" if elements is None else f"{elements} elements"
