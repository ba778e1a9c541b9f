"""Copies between a device and its host: one copier and one stream per direction, and the order between them (rule R9).

    compute  ── F k ──┬── B j ──────────────┬── F k+1 ──┬─ [3] ──   ── B k ──[4]──
    to host           └ [1] copies of k ──┐ │           │             ↑
    back                                  └───────────────[2] copies ─┘

 [1] a copy waits for all compute issued so far, so its source exists
 [2] and for the copies it must follow: a reload for its own copy out, a copy out for the last reader of its host memory
 [3] a copy holds its tensors until compute waits for it or its event is reached. Memory that is freed after a wait can be
     allocated again at once; with the caching allocator's `record_stream` it would return only when the host polls the event
 [4] a backward waits for the copies that it needs, on the compute stream
 [5] where the plan keeps copies and messages apart, a message waits for all copies issued so far, and the next copies are issued
     when the exchange is over

Copies wait only for copies issued before them, and never for a message, so they cannot deadlock. A step that fails waits for
none: its copies may be queued after compute that waits for a dead peer. Their memory is held until they are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, final

from torch import Tensor

from megatron_lynx.runtime.device import Clock, Device, Event, Trace

Pair = tuple[Tensor, Tensor]
"""Target and source, of the same size."""


@final
@dataclass(eq=False)
class Copy:
    """One copy of several tensors of a micro-batch, which is counted from 0 over the run."""

    micro_batch: int
    pairs: Sequence[Pair] | None
    """Is None once compute may reuse their memory."""
    event: Event

    @property
    def done(self) -> bool:
        """Whether it is over, or compute waits for it. Decides when memory is freed, never which tasks run (rule R1)."""
        if self.pairs is not None and self.event.done:
            self.release()
        return self.pairs is None

    def release(self) -> None:
        self.pairs = None  # [3]


@final
class Copier:
    """Copies in one direction. Tests replace `move` to inject faults."""

    def __init__(self, direction: Literal["offload", "reload"], device: Device, trace: Trace) -> None:
        self.direction = direction
        self.move: Callable[[Tensor, Tensor], object] = partial(Tensor.copy_, non_blocking=True)
        self._device = device
        self._trace = trace
        self._stream = device.stream(direction)
        self._bytes = 0
        self._holding: deque[Copy] = deque()
        self._waits = Clock(device, runs=True)
        self._waited_s = 0.0

    def start(self, pairs: Sequence[Pair], micro_batch: int, after: Iterable[Copy | None] = ()) -> Copy:
        """Copy after the compute issued so far and the copies `after`. Errors of the device are raised here."""
        self.settle()
        self._stream.wait(self._device.current.record())  # [1]
        for before in dict.fromkeys(copy for copy in after if copy is not None):
            self._stream.wait(before.event)  # [2]
        try:
            self._stream.run(partial(self._move_all, pairs, micro_batch))
        finally:
            self._holding.append(Copy(micro_batch, pairs, self._stream.record()))
        self._bytes += sum(target.nbytes for target, _ in pairs)
        return self._holding[-1]

    def _move_all(self, pairs: Sequence[Pair], micro_batch: int) -> None:
        begin = self._trace.now()
        for target, source in pairs:
            self.move(target, source)
        self._trace.add(self.direction, begin, micro_batch=micro_batch)

    def give_way(self) -> None:
        """Let work issued from now on, such as a message, wait for all copies issued so far."""  # [5]
        if self._holding:
            self.wait(self._holding[-1])

    def wait(self, copy: Copy) -> None:
        """Let compute issued from now on wait for this copy."""
        if not copy.done:
            begin, traced = self._waits.begin(), self._trace.now()
            self._device.current.wait(copy.event)  # [4]
            self._trace.add("copy_wait", traced, micro_batch=copy.micro_batch)
            self._waits.end("copy", begin)
            copy.release()

    def settle(self) -> None:
        """Drop the tensors of finished copies, and add up finished waits."""
        while self._holding and self._holding[0].done:
            self._holding.popleft()
        self._add_up(exact=False)

    def drain(self) -> None:
        """Wait on the host for all copies issued so far."""
        self._stream.record().synchronize()
        self.settle()

    def close(self) -> None:
        """Keep the tensors of unfinished copies alive until they are over."""
        self.settle()
        for copy in self._holding:
            self._device.hold(copy, copy.event)

    def take_bytes(self) -> int:
        taken, self._bytes = self._bytes, 0
        return taken

    def take_waited_s(self, *, exact: bool = True) -> float:
        """Return seconds for which compute waited for copies since the last call; `exact` as in `Clock.take`."""
        self._add_up(exact)
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _add_up(self, exact: bool) -> None:
        self._waited_s += sum(seconds for _, seconds in self._waits.take(exact=exact))


def copiers_for(device: Device, trace: Trace) -> tuple[Copier, Copier]:
    return Copier("offload", device, trace), Copier("reload", device, trace)
