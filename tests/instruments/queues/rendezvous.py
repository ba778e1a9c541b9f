"""When collectives and messages of several devices are over: when the other sides are under way, too. Nothing is buffered.

collective   all members of a communicator have the same one under way
message      sender and receiver have it under way, on one communicator and with as many elements; the first sent is the
             first received. Messages that were posted together are over when each of them is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.instruments.queues.device import Device
from tests.instruments.queues.log import Collective, Message, Messages


class Rendezvous:
    """What is under way on several devices, whose number is their rank."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._open: dict[int, list[Message]] = {}
        """The messages that are not over, by the identity of what they were posted in."""

    def settle(self) -> bool:
        """End everything whose other sides are under way; whether there was any."""
        settled = False
        for rank, device in enumerate(self._devices):
            for communication in list(device.under_way):
                if isinstance(communication, Collective):
                    settled |= self._settle_collective(communication)
                else:
                    settled |= self._settle_messages(rank, communication)
        return settled

    def still_open(self, messages: Messages) -> list[Message]:
        """Those of messages posted together whose other side is not there yet."""
        return self._open.setdefault(id(messages), list(messages.messages))

    def _settle_collective(self, collective: Collective) -> bool:
        members = collective.communicator.members
        found = [self._collective_of(rank, collective) for rank in members]
        if any(other is None for other in found):
            return False
        for rank, other in zip(members, found, strict=True):
            assert other is not None
            self._devices[rank].end(other)
        return True

    def _collective_of(self, rank: int, collective: Collective) -> Collective | None:
        equal = (other for other in self._devices[rank].under_way if isinstance(other, Collective) and other == collective)
        return next(equal, None)

    def _settle_messages(self, rank: int, sending: Messages) -> bool:
        """Match what `rank` sends."""
        settled = False
        for message in [open for open in self.still_open(sending) if open.direction == "send"]:
            receiving = self._receiving(message.peer, rank, sending)
            wanted = Message("receive", rank, message.elements)
            if receiving is None or wanted not in self.still_open(receiving):
                continue
            self._close(rank, sending, message)
            self._close(message.peer, receiving, wanted)
            settled = True
        return settled

    def _receiving(self, rank: int, sender: int, sending: Messages) -> Messages | None:
        """What a rank has under way on the same communicator that receives from the sender."""
        for other in self._devices[rank].under_way:
            if isinstance(other, Messages) and other.communicator == sending.communicator:
                return other
        return None

    def _close(self, rank: int, messages: Messages, message: Message) -> None:
        open = self.still_open(messages)
        open.remove(message)
        if not open:
            self._devices[rank].end(messages)
