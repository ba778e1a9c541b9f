"""One GPU, as far as order goes: streams that share hardware queues.

    CUDA_DEVICE_MAX_CONNECTIONS=1                  8
    queue 0   F  recv  wait  send  F  ...          queue 0   F   wait   F  ...        compute
              └ head                               queue 1   recv  send ...           pp of 0, 1

A queue hands out what the host gave it, in that order. Its head goes when everything before it in its own stream is over and, if
it waits for an event, when that is reached. Until then it holds up the whole queue, whatever streams are behind it. What has gone
holds up its own stream only: a message that nobody matches stays under way while kernels of other streams run beside it.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from tests.instruments.queues.log import COMPUTE, Communication, Event, Given, Kernel, Wait


class Placed(NamedTuple):
    """Something that the device was given, and how many things its stream was given before."""

    given: Given
    before: int


class Device:
    """One rank's device.

    Args:
        hardware_queues: the value of CUDA_DEVICE_MAX_CONNECTIONS. Streams are dealt to them in the order of their first use.
        stop: a point that the device never gets to.
    """

    def __init__(self, hardware_queues: int, stop: Event | None = None) -> None:
        self.queues: list[deque[Placed]] = [deque() for _ in range(hardware_queues)]
        self.under_way: list[Communication] = []
        """Collectives and messages that have gone, and whose other sides may not be there yet."""
        self.ran: list[str] = []
        """Names of the kernels that are over."""
        self._stop = stop
        self._given: Counter[str] = Counter()
        self._over: Counter[str] = Counter()
        self._queue_of: dict[str, int] = {COMPUTE: 0}

    def give(self, given: Given) -> None:
        """The host puts something at the end of its stream, and so of its stream's queue."""
        number = self._queue_of.setdefault(given.stream, len(self._queue_of) % len(self.queues))
        self.queues[number].append(Placed(given, self._given[given.stream]))
        self._given[given.stream] += 1

    def advance(self) -> bool:
        """Hand out heads as far as they can go; whether any did."""
        before = sum(map(len, self.queues))
        moving = True
        while moving:
            moving = False
            for queue in self.queues:
                while queue and self.can_go(queue[0]):
                    self._go(queue.popleft().given)
                    moving = True
        return sum(map(len, self.queues)) < before

    def end(self, communication: Communication) -> None:
        """A collective, or the last of some messages, is over."""
        self.under_way = [other for other in self.under_way if other is not communication]
        self._over[communication.stream] += 1

    def reached(self, event: Event) -> bool:
        return self._over[event.stream] >= event.things

    def can_go(self, head: Placed) -> bool:
        """Whether nothing holds up the head of a queue."""
        event = head.given.event if isinstance(head.given, Wait) else None
        return self.stream_is_free(head) and not self._stops(head) and (event is None or self.reached(event))

    def stream_is_free(self, head: Placed) -> bool:
        """Whether everything before it in its stream is over."""
        return self._over[head.given.stream] == head.before

    def _stops(self, head: Placed) -> bool:
        return self._stop is not None and head.given.stream == self._stop.stream and head.before + 1 >= self._stop.things

    def _go(self, given: Given) -> None:
        if isinstance(given, Kernel | Wait):
            self._over[given.stream] += 1
            if isinstance(given, Kernel):
                self.ran.append(given.name)
        else:
            self.under_way.append(given)
