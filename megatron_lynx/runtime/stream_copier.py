"""Copies on CUDA: a copier is a stream, a copy an event on it.

    compute   ──a──┬────────────────b────────────┬─ wait(copy) ── c
    copier         └─ [1] behind a [2] behind others: memcpy, event ─┘ [3]

 [3] a copy holds its tensors until compute comes behind it or its event is over: what the caller drops early is not used again
     before, and what it lets go behind a wait can be used again at once. Recorded with the caching allocator instead
     (`record_stream`), memory would come back only when the host finds the event over, far behind what the host has issued.

A slab of host memory goes only when the device is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, final

import torch
from torch import Tensor

from megatron_lynx.runtime.trace import Trace
from megatron_lynx.runtime.transfer import Copier, Copy, Direction, Owner, failed

MOST_WAITS = 256
"""Waits of one direction that are timed and not added up yet."""


@final
class _StreamCopy(Copy):
    def __init__(self, direction: Direction, owner: Owner, tensors: tuple[Tensor, Tensor]) -> None:
        super().__init__(direction, owner, tensors[0].nbytes)
        self.event = torch.cuda.Event()
        self._tensors: tuple[Tensor, Tensor] | None = tensors

    @property
    def done(self) -> bool:
        over = bool(self.event.query())
        if over:
            self.let_go()
        return over

    def let_go(self) -> None:
        self._tensors = None  # [3]

    @property
    def holds(self) -> bool:
        return self._tensors is not None


@final
class StreamCopier(Copier):
    """A stream of its own."""

    def __init__(self, direction: Direction, trace: Trace, device: torch.device) -> None:
        super().__init__(direction, trace)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._holding: deque[_StreamCopy] = deque()
        """Copies, first one first."""
        self._waits: list[tuple[Any, Any]] = []
        self._waited_s = 0.0

    def _started(self, target: Tensor, source: Tensor, owner: Owner, after: Iterable[Copy | None]) -> Copy:
        self.settle()
        copy = _StreamCopy(self.direction, owner, (target, source))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # [1]
        for before in after:
            if isinstance(before, _StreamCopy):
                self._stream.wait_event(before.event)  # [2]
        try:
            with torch.cuda.stream(self._stream), self._trace.span(self.direction, micro_batch=owner.micro_batch):
                target.copy_(source, non_blocking=True)
        except Exception as error:
            raise failed(self.direction, owner, copy.bytes, error) from error
        finally:
            copy.event.record(self._stream)
            self._holding.append(copy)
        return copy

    def wait(self, copy: Copy) -> None:
        assert isinstance(copy, _StreamCopy)
        compute = torch.cuda.current_stream(self._device)
        if copy.done:
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(compute)
        with self._trace.span("copy_wait", micro_batch=copy.owner.micro_batch):
            compute.wait_event(copy.event)
        end.record(compute)
        self._waits.append((begin, end))
        if len(self._waits) >= MOST_WAITS:
            self._add_up()
        copy.let_go()

    def settle(self) -> None:
        while self._holding and (not self._holding[0].holds or self._holding[0].done):
            self._holding.popleft()

    def drain(self) -> None:
        self._stream.synchronize()
        self.settle()

    def cancel(self) -> None:
        self._newest = None
        self.drain()

    def take_waited_s(self, *, exact: bool = True) -> float:
        if self._waits and exact:
            torch.cuda.synchronize(self._device)
        self._add_up()
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _add_up(self) -> None:
        """What the device has passed by now. Nobody may ever ask for the sum, so events must not pile up."""
        waits, self._waits = self._waits, []
        for begin, end in waits:
            if end.query():
                self._waited_s += float(begin.elapsed_time(end)) / 1e3
            else:
                self._waits.append((begin, end))

    def close(self) -> None:
        self.drain()
