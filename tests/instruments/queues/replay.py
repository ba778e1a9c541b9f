"""Replays the logs of all ranks together: hosts give, queues hand out, what meets is over, until nothing moves any more.

    hosts ── give ──> queues ── heads ──> under way ── other side there ──> over
      └──── wait for events <──────────────────────────────────────────────┘

Nothing here takes time and nothing overtakes, so in whatever order the ranks are looked at, the end is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.instruments.queues.device import Device, Placed
from tests.instruments.queues.hosts import Hosts
from tests.instruments.queues.log import Communication, Event, HostWait, Log, Meeting, Messages, Wait
from tests.instruments.queues.outcome import Outcome, StuckRank
from tests.instruments.queues.rendezvous import Rendezvous


class Stopped(NamedTuple):
    """A device that never gets to an event of one of its streams, as if what comes before took for ever."""

    rank: int
    before: Event


def replay(logs: Sequence[Log], hardware_queues: int, stopped: Stopped | None = None) -> Outcome:
    """Run the logs of all ranks, in order of rank.

    Args:
        logs: one for each rank.
        hardware_queues: CUDA_DEVICE_MAX_CONNECTIONS: 1 where Megatron wants it (tensor parallelism before Blackwell), else 8.
        stopped: a device that never gets to some point. What runs all the same does not wait for it.
    """
    assert [log.rank for log in logs] == list(range(len(logs))), "one log for each rank, in order"
    return _Replay(logs, hardware_queues, stopped).outcome()


class _Replay:
    def __init__(self, logs: Sequence[Log], hardware_queues: int, stopped: Stopped | None) -> None:
        self._hardware_queues = hardware_queues
        stops = {stopped.rank: stopped.before} if stopped is not None else {}
        self._devices = [Device(hardware_queues, stops.get(log.rank)) for log in logs]
        self._hosts = Hosts(logs, self._devices)
        self._rendezvous = Rendezvous(self._devices)

    def outcome(self) -> Outcome:
        while self._step():
            pass
        ranks = range(len(self._devices))
        over = all(self._is_over(rank) for rank in ranks)
        ran = tuple(tuple(device.ran) for device in self._devices)
        return Outcome(self._hardware_queues, () if over else tuple(map(self._stuck, ranks)), ran)

    def _step(self) -> bool:
        moved = self._hosts.advance()
        for device in self._devices:
            moved |= device.advance()
        return self._rendezvous.settle() or moved

    def _is_over(self, rank: int) -> bool:
        device = self._devices[rank]
        return self._hosts.waiting_at(rank) is None and not device.under_way and not any(device.queues)

    # --- what to say of a rank that is stuck ---------------------------------------------------------------------------

    def _stuck(self, rank: int) -> StuckRank:
        device = self._devices[rank]
        under_way = tuple(map(self._under_way, device.under_way))
        heads = tuple(self._head(device, number) for number, queue in enumerate(device.queues) if queue)
        return StuckRank(rank, self._hosts.marks[rank], self._waiting(rank), under_way, heads)

    def _under_way(self, communication: Communication) -> str:
        if isinstance(communication, Messages):
            return f"{_listed(self._rendezvous.still_open(communication))} on {communication.communicator}"
        return str(communication)

    def _waiting(self, rank: int) -> str:
        entry = self._hosts.waiting_at(rank)
        if isinstance(entry, HostWait):
            streams = [event.stream for event in entry.events if not self._devices[rank].reached(event)]
            return f"the host waits in {entry.name} for {_listed(streams)}"
        if isinstance(entry, Meeting):
            absent = _listed(f"rank {member}" for member in self._hosts.absent(entry))
            return f"the host makes the communicator {entry.communicator}, and waits for {absent}"
        return ""

    def _head(self, device: Device, number: int) -> str:
        """What cannot go, and how much that holds up. A wait stands for what waits, if its event is reached."""
        queue = device.queues[number]
        head = queue[0]
        if isinstance(head.given, Wait) and device.reached(head.given.event):
            waiting = (other for other in queue if other.given.stream == head.given.stream and not isinstance(other.given, Wait))
            head = next(waiting, head)
        behind = [other for other in queue if other is not head and not isinstance(other.given, Wait)]
        held_up = f"; it holds up {len(behind)} behind it" if behind else ""
        return f"queue {number}: {head.given}{self._reason(device, head)}{held_up}"

    def _reason(self, device: Device, head: Placed) -> str:
        if not device.stream_is_free(head):
            return f", behind {_listed(other for other in device.under_way if other.stream == head.given.stream)}"
        return f", which {head.given.stream} waits for" if isinstance(head.given, Wait) else ""


def _listed(things: Iterable[object]) -> str:
    return " and ".join(map(str, things))
