"""Finds what is used before it was waited for, and let go while it is still used, whether or not a run shows it.

    streams (`asynchronous`)        copies read and write; events and waits order them           StreamListener
    torch.distributed (`posted`)    a work reads and writes from where it was posted; waited     WorkListener
    compute (`compute`)             every operation of torch reads and writes

From the waits that were asked for follows what comes before what (`order`), from that which two accesses are a race (`memory`).
Memory that is let go can be another tensor's at once: the allocator of a GPU orders that on the stream that let it go, and on no
other. So a copy's memory must not be let go before compute comes behind the copy; it is watched until then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, final

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron_lynx.nest import all_in
from megatron_lynx.testbed.links import Posted
from tests.instruments.posted import WorkListener
from tests.instruments.streams.listener import COMPUTE, StreamListener
from tests.instruments.streams.memory import Access, Memory, Race
from tests.instruments.streams.move import Move
from tests.instruments.streams.order import Order, Point

IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
"""Collectives that read and write the same tensors. Others write their first argument and read their second."""


@final
class HappensBefore(StreamListener, WorkListener):
    """An account of one process. `races`: what was found, each pair of accesses once."""

    def __init__(self) -> None:
        self._order = Order()
        self._memory = Memory(self._order)
        self._found: dict[Race, None] = {}
        self._points: weakref.WeakKeyDictionary[Work, Point] = weakref.WeakKeyDictionary()
        self._moves: list[tuple[str, int, Move]] = []
        """Copies that compute does not come behind yet, with their streams and numbers."""

    @property
    def races(self) -> list[Race]:
        return list(self._found)

    # --- compute -------------------------------------------------------------------------------------------------------

    def computes(self, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """An operation of torch, on the stream of compute."""
        self._look_for_early_ends(what)
        self._does(COMPUTE, what, reads, writes)

    def host_reads(self) -> None:
        """The host has fetched a number that compute made: it has waited for compute."""
        self.host_waits(self._order.point(COMPUTE))

    def _look_for_early_ends(self, what: str) -> None:
        left = []
        for actor, number, move in self._moves:
            if self._order.knows(COMPUTE, actor, number):
                continue
            used = move.let_go_early()
            if used is None:
                left.append((actor, number, move))
            else:
                self._add(Race(f"{move.what} ({used}, on {actor})", f"letting go of that memory, which {what} can get,"))
        self._moves = left

    # --- streams -------------------------------------------------------------------------------------------------------

    def recorded(self, stream: str) -> Point:
        return self._order.point(stream)

    def stream_waits(self, stream: str, point: Point) -> None:
        self._order.comes_behind(stream, point)

    def host_waits(self, point: Point) -> None:
        self._order.host_comes_behind(point)

    def host_knows(self, point: Point) -> bool:
        return self._order.host_knows(point)

    def host_waits_for_all(self) -> None:
        self._order.host_comes_behind_all()

    def moves(self, stream: str, move: Move) -> None:
        number = self._does(stream, move.what, [move.source], [move.target])
        self._moves.append((stream, number, move))

    # --- torch.distributed ---------------------------------------------------------------------------------------------

    def posted(self, work: Work, posted: Posted, args: tuple[Any, ...]) -> None:
        """A work comes behind what compute was given so far, and behind those of the same communicator."""
        reads, writes = _used_by(posted.operation, args)
        queue = _queue_of(posted)
        self._order.comes_behind(queue, self._order.point(COMPUTE))
        self._does(queue, str(posted), reads, writes)
        self._points[work] = self._order.point(queue)

    def waits(self, work: Work) -> None:
        """Compute comes behind a work, and the host does not."""
        if work in self._points:
            self._order.comes_behind(COMPUTE, self._points[work])

    # -------------------------------------------------------------------------------------------------------------------

    def _does(self, actor: str, what: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> int:
        number = self._order.next(actor)
        for writing, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                if tensor.numel():
                    for race in self._memory.touched(tensor, Access(actor, number, writing, what)):
                        self._add(race)
        return number

    def _add(self, race: Race) -> None:
        self._found[race] = None


def _used_by(operation: str, args: tuple[Any, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that a method of `ProcessGroup` reads, and those that it writes."""
    first, second = (all_in(Tensor, args[index]) if index < len(args) else [] for index in (0, 1))
    if operation == "send":
        return first, []
    if operation == "recv":
        return [], first
    return (first, first) if operation in IN_PLACE else (second, first)


def _queue_of(posted: Posted) -> str:
    """NCCL works off a communicator's collectives in order, and the messages of a pair."""
    group: ProcessGroup = posted.group
    return f"group {group.group_name}" if posted.pair is None else f"group {group.group_name}, {posted.operation} {posted.peer}"
