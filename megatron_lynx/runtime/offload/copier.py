"""Copies between a device and its host: one copier per direction, and the order between them (rule R9).

    compute  ── F k ──┬── B j ──────────────┬── F k+1 ──┬─ [3] ──   ── B k ──[4]──
    to host           └ [1] copies of k ──┐ │           │             ↑
    back                                  └───────────────[2] copies ─┘

 [1] a copy starts when what it reads exists: behind everything the compute stream was given so far
 [2] and behind the copies that it is told to follow: a reload behind its own way out, a way out behind its block's last reader
 [3] a copy holds its tensors until compute comes behind it or its event is over: what the caller drops early is not used again
     before, and what it lets go behind a wait can be used again at once. Recorded with CUDA's caching allocator instead
     (`record_stream`), memory would come back only when the host finds the event over, far behind what the host has issued
 [4] a backward waits for the copies that it needs, on the compute stream
 [5] where the plan keeps copies and messages apart: a message begins behind the copies asked for so far, and the next ones are
     asked for when the exchange is over
 [6] a step that fails waits for copies that have begun, for two seconds at most: [1] may be behind a receive whose peer is dead,
     and then the rank's error must still come out. What such a copy reads and writes is held until it is over, also without its
     copier

A copier has a stream of its own (`runtime.device`), and a copy is an event on it. Copies only follow copies that were started
before them, and never a message, so nothing can wait in a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple, final

from torch import Tensor

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.runtime.device import Device, Event
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.units import format_bytes

Direction = Literal["offload", "reload"]
Pair = tuple[Tensor, Tensor]
"""Target and source, of the same size."""
Move = Callable[[Tensor, Tensor], object]
"""Copies the second tensor's bytes into the first."""

GRACE_S = 2.0
"""How long a step that failed waits for copies that have begun: as long as gigabytes take."""

MOST_WAITS = 256
"""Waits of one direction that are timed and not added up yet."""


class Owner(NamedTuple):
    """Says whose bytes a copy moves, for errors and traces."""

    where: str
    """`stage 0, chunk 1`."""
    micro_batch: int
    """Counted from 0 over the run."""


@final
@dataclass(eq=False)
class Copy:
    """One order to copy, and one thing to wait for: the tensors of one half, say."""

    direction: Direction
    owner: Owner
    bytes: int
    pairs: Sequence[Pair] | None
    """None as soon as compute may use them again."""
    after: Sequence[Copy]
    """Copies that it comes behind; none once it runs."""
    event: Event = field(init=False)
    """Its end on the copier's stream."""
    cancelled: bool = False
    error: Exception | None = None
    broken_by: Copy | None = None
    """The copy that failed, where it is one that this one came behind."""

    @property
    def done(self) -> bool:
        """Whether it is over by now, well or not, or waited for. Never decides what runs (rule R1), only when memory is given
        back."""
        if self.behind or not self.event.done:
            return self.behind
        self.let_go()
        return True

    @property
    def behind(self) -> bool:
        """Whether compute comes behind it already, or it is over: nobody has to wait for it again."""
        return self.pairs is None

    @property
    def well(self) -> bool:
        """Whether compute comes behind it already, and it is not known to have failed."""
        return self.behind and self.error is None

    def let_go(self) -> None:
        """Compute comes behind it, or it is over."""
        self.pairs = None  # [3]

    def check(self) -> None:
        """Raises `OffloadError` for a copy that is known to have failed."""
        if self.error is not None:
            # A new error each time: one that is kept would get a traceback and with it the step's graph, which keeps the copy.
            broken = self.broken_by or self
            raise failed(broken.direction, broken.owner, broken.bytes, self.error) from self.error

    def run(self, move: Move, trace: Trace) -> None:
        """On the copier's stream. Whatever goes wrong is kept for the one who waits."""
        broken = next((before for before in self.after if before.error is not None), None)
        self.after = ()
        if broken is not None:
            self.error, self.broken_by = broken.error, broken.broken_by or broken
        elif self.cancelled:
            self.error = RuntimeError("the step had failed before")
        else:
            try:
                assert self.pairs is not None
                with trace.span(self.direction, micro_batch=self.owner.micro_batch):
                    for target, source in self.pairs:
                        move(target, source)
            except Exception as error:  # noqa: BLE001 (handed to whoever waits)
                self.error = error.with_traceback(None)  # which would keep the callers, and all that they hold


@final
class Copier:
    """The copies of one direction. `move` is how bytes are copied: tests inject faults there."""

    def __init__(self, direction: Direction, device: Device, trace: Trace) -> None:
        self.direction = direction
        self.move: Move = partial(Tensor.copy_, non_blocking=True)
        self._device = device
        self._trace = trace
        self._stream = device.stream(direction)
        self._bytes = 0
        self._newest: Copy | None = None
        self._holding: deque[Copy] = deque()
        """Copies that may hold tensors, first one first."""
        self._stands = False
        """Whether the stream was found not to go on."""
        self._waits: list[tuple[Event, Event]] = []
        self._waited_s = 0.0

    def start(self, pairs: Sequence[Pair], owner: Owner, after: Iterable[Copy | None] = ()) -> Copy:
        """Copy behind what the compute stream was given so far, and behind `after`. The caller need not hold the tensors."""
        self.settle()
        others = list(dict.fromkeys(before for before in after if before is not None))
        copy = Copy(self.direction, owner, sum(target.nbytes for target, _ in pairs), pairs, others)
        self._stream.wait(self._device.current.record())  # [1]
        for before in others:
            self._stream.wait(before.event)  # [2]
        self._stream.run(partial(copy.run, self.move, self._trace))
        copy.event = self._stream.record()
        self._holding.append(copy)
        self._newest = copy
        self._bytes += copy.bytes
        return copy

    def give_way(self) -> None:
        """What is issued from now on, a message say, comes behind all copies asked for so far."""  # [5]
        if self._newest is not None:
            self.wait(self._newest)
            self._newest = None

    def wait(self, copy: Copy) -> None:
        """What is computed from now on comes behind this copy. Raises `OffloadError` where the copy is known to have failed."""
        if not copy.done:
            compute = self._device.current
            begin = compute.record(timed=True)
            with self._trace.span("copy_wait", micro_batch=copy.owner.micro_batch):
                compute.wait(copy.event)  # [4]
            self._waits.append((begin, compute.record(timed=True)))
            if len(self._waits) >= MOST_WAITS:
                self._add_up()
            copy.let_go()
        copy.check()

    def settle(self) -> None:
        """Let go of the tensors of copies that are over."""
        while self._holding and self._holding[0].done:
            self._holding.popleft()
            self._stands = False

    def drain(self) -> None:
        """Wait, on the host, until nothing is under way."""
        self._stream.synchronize()
        self.settle()

    def cancel(self) -> None:
        """Drop what has not begun, and wait for what has, but not for long: it may stand behind a message that nobody sends any
        more. [6]"""
        self._newest = None
        for copy in self._holding:
            copy.cancelled = True
        if self._holding and not self._stands:
            self._stands = not self._stream.record().within(GRACE_S)
        self.settle()

    def close(self) -> None:
        """Nothing is copied any more."""
        self.cancel()
        if not self._holding:
            self._stream.close()
        for copy in self._holding:
            self._device.hold(copy, copy.event)

    def take_bytes(self) -> int:
        """Bytes of the copies that were started since this was last asked."""
        taken, self._bytes = self._bytes, 0
        return taken

    def take_waited_s(self, *, exact: bool = True) -> float:
        """Seconds for which compute waited in `wait` since this was last asked. On CUDA that is known when the device has passed:
        `exact` waits for it, otherwise what is not over yet counts next time."""
        if exact:
            for _, end in self._waits:
                end.synchronize()
        self._add_up()
        waited_s, self._waited_s = self._waited_s, 0.0
        return waited_s

    def _add_up(self) -> None:
        """What the device has passed by now. Nobody may ever ask for the sum, so events must not pile up."""
        waits, self._waits = self._waits, []
        for begin, end in waits:
            if end.done:
                self._waited_s += end.seconds_since(begin)
            else:
                self._waits.append((begin, end))


def copiers_for(device: Device, trace: Trace) -> tuple[Copier, Copier]:
    """(to the host, back) for a device."""
    return Copier("offload", device, trace), Copier("reload", device, trace)


def failed(direction: Direction, owner: Owner, size_bytes: int, error: BaseException) -> OffloadError:
    """The error of a step whose copy failed."""
    what = "copying activations to the host" if direction == "offload" else "copying activations back from the host"
    problem = Problem(
        f"{owner.where}, micro-batch {owner.micro_batch} of this run, {size_bytes} bytes",
        f"{type(error).__name__}: {error}",
        f"{format_bytes(size_bytes)} copied",
        "lower the stage's offload.bytes in the plan if memory was short",
    )
    return OffloadError(f"{what} failed", [problem])
