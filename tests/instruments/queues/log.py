"""What the host of one rank gave to its device, and where it waited: the input of a replay, noted by `recorder` or by hand.

    log = Log(rank=0)
    log.kernel("forward 0")
    sent = log.message("send", peer=1, on=Communicator("pp", (0, 1)))
    log.wait(sent)                    what compute is given from now on comes behind the message; the host goes on
    log.synchronize()                 the host waits for everything

As with PyTorch's NCCL groups, each communicator has a stream of its own. What it is given comes behind what compute was given
before, and to wait for it holds up compute, not the host. A communicator is made at its first use: its members' hosts meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

COMPUTE = "compute"
"""The stream on which Megatron computes."""

Direction = Literal["send", "receive"]


class Communicator(NamedTuple):
    """Ranks that communicate with each other, in one order and on one stream of each.

    NCCL's groups have one for collectives and batched messages, and one for each pair of ranks that exchange messages alone.
    """

    name: str
    members: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(map(str, self.members))}"


class Event(NamedTuple):
    """The point behind the first `things` that a stream was given."""

    stream: str
    things: int


class Message(NamedTuple):
    """One side of a message between two ranks."""

    direction: Direction
    peer: int
    elements: int = 1

    def __str__(self) -> str:
        return f"{self.direction} {'to' if self.direction == 'send' else 'from'} rank {self.peer}"


@dataclass(frozen=True)
class Kernel:
    """Something that is over when it has run."""

    stream: str
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Wait:
    """What its stream is given from now on comes behind an event, which may be another stream's."""

    stream: str
    event: Event

    def __str__(self) -> str:
        return f"wait for {self.event.stream}"


@dataclass(frozen=True)
class Collective:
    """Over when every member's collective with the same place in the communicator's order is under way."""

    communicator: Communicator
    what: str

    @property
    def stream(self) -> str:
        return str(self.communicator)

    def __str__(self) -> str:
        return f"{self.what} on {self.communicator}"


@dataclass(frozen=True)
class Messages:
    """Messages that are posted together. Over when the other side of each is under way."""

    communicator: Communicator
    messages: tuple[Message, ...]

    @property
    def stream(self) -> str:
        return str(self.communicator)

    @property
    def receives(self) -> bool:
        return any(message.direction == "receive" for message in self.messages)

    def __str__(self) -> str:
        return f"{' and '.join(map(str, self.messages))} on {self.communicator}"


@dataclass(frozen=True)
class HostWait:
    """The host goes on when all events are reached."""

    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Meeting:
    """The host goes on when the hosts of all members are there: NCCL makes a communicator at its first use."""

    communicator: Communicator


@dataclass(frozen=True)
class Mark:
    """Where the host is, for people."""

    text: str


Communication = Collective | Messages
Given = Kernel | Wait | Collective | Messages
"""What a device is given."""
Entry = Given | HostWait | Meeting | Mark


@dataclass
class Log:
    """One rank's entries in the order of its host."""

    rank: int
    entries: list[Entry] = field(default_factory=list)
    _given: Counter[str] = field(default_factory=Counter)
    _made: set[Communicator] = field(default_factory=set)

    def kernel(self, name: str, stream: str = COMPUTE) -> Event:
        """Kernels of one name in a row are one."""
        latest = self.entries[-1] if self.entries else None
        if latest == Kernel(stream, name):
            return self.event(stream)
        return self._give(Kernel(stream, name))

    def wait(self, event: Event, stream: str = COMPUTE) -> None:
        """Let a stream wait for what another one was given."""
        if event.stream != stream:
            self._give(Wait(stream, event))

    def collective(self, what: str, on: Communicator, stream: str = COMPUTE) -> Event:
        """Start a collective behind what `stream` was given; the point at which it is over."""
        return self._communicate(Collective(on, what), stream)

    def message(self, direction: Direction, peer: int, on: Communicator, elements: int = 1, stream: str = COMPUTE) -> Event:
        """Post a message on its own; the point at which it is over."""
        return self.messages([Message(direction, peer, elements)], on, stream)

    def messages(self, messages: Sequence[Message], on: Communicator, stream: str = COMPUTE) -> Event:
        """Post messages together; the point at which all of them are over."""
        return self._communicate(Messages(on, tuple(messages)), stream)

    def synchronize(self, name: str = "torch.cuda.synchronize", events: Sequence[Event] | None = None) -> None:
        """Let the host wait for events; for everything that the device was given, if none are named."""
        all_streams = tuple(Event(stream, things) for stream, things in self._given.items())
        self.entries.append(HostWait(name, all_streams if events is None else tuple(events)))

    def barrier(self, on: Communicator) -> None:
        """What `torch.distributed.barrier` does with NCCL: a collective for which the host waits."""
        self.synchronize("barrier", [self.collective("barrier", on)])

    def mark(self, text: str) -> None:
        """Say where the host is."""
        self.entries.append(Mark(text))

    def event(self, stream: str = COMPUTE) -> Event:
        """The point behind what a stream was given so far."""
        return Event(stream, self._given[stream])

    def _communicate(self, communication: Communication, stream: str) -> Event:
        communicator = communication.communicator
        if communicator not in self._made:
            self._made.add(communicator)
            self.entries.append(Meeting(communicator))
        self.wait(self.event(stream), communication.stream)
        return self._give(communication)

    def _give(self, given: Given) -> Event:
        self.entries.append(given)
        self._given[given.stream] += 1
        return self.event(given.stream)
