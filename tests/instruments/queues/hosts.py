"""How far the hosts of all ranks get: they give their devices what their logs say, and wait where the logs say so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.instruments.queues.device import Device
from tests.instruments.queues.log import Communicator, Entry, HostWait, Log, Mark, Meeting


class Hosts:
    """The hosts, each with its log and its device. A host's number is its rank."""

    def __init__(self, logs: Sequence[Log], devices: Sequence[Device]) -> None:
        self._logs = logs
        self._devices = devices
        self._at = [0] * len(logs)
        self._arrived: defaultdict[Communicator, set[int]] = defaultdict(set)
        self.marks = [""] * len(logs)
        """The last mark that each host came by."""

    def advance(self) -> bool:
        """Let every host go on until it waits; whether any did."""
        before = list(self._at)
        for rank in range(len(self._logs)):
            while (entry := self.waiting_at(rank)) is not None and self._passes(rank, entry):
                self._at[rank] += 1
        return self._at != before

    def waiting_at(self, rank: int) -> Entry | None:
        """The entry that a host has not come by; none: it is at its end."""
        entries = self._logs[rank].entries
        return entries[self._at[rank]] if self._at[rank] < len(entries) else None

    def absent(self, meeting: Meeting) -> list[int]:
        """The members whose hosts have not come to the making of a communicator."""
        return sorted(set(meeting.communicator.members) - self._arrived[meeting.communicator])

    def _passes(self, rank: int, entry: Entry) -> bool:
        if isinstance(entry, HostWait):
            return all(map(self._devices[rank].reached, entry.events))
        if isinstance(entry, Meeting):
            self._arrived[entry.communicator].add(rank)
            return not self.absent(entry)
        if isinstance(entry, Mark):
            self.marks[rank] = entry.text
        else:
            self._devices[rank].give(entry)
        return True
