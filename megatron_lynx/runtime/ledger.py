"""Which micro-batches are in flight, which one's backward runs, and which comes next.

    stage s of p, warm-up w = p-1-s      F0 .. F(w-1) | F(w) B0 | F(w+1) B1 | ...          | B .. B
                                          warm-up       steady: the collectives of F(w+i)    cool-down: only the receive
                                                        hide replays of i                    hides replays

Megatron's schedule functions tell a step neither its micro-batch nor its phase. Both follow from the order of calls: 1F1B is
first in, first out. A micro-batch is recognised by the identity of its output tensor, which is held weakly: holding an alias
would keep memory that the schedule frees.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from megatron_lynx.runtime.saved import tensors_in
from megatron_lynx.runtime.window import FrameKey, Phase

if TYPE_CHECKING:
    from megatron_lynx.runtime.frame import Frame


@dataclass(eq=False)
class MicroBatch:
    """One forward of one chunk, until its backward is over. Frames belong to autograd's graph, so they are held weakly."""

    number: int
    frames: weakref.WeakValueDictionary[FrameKey, Frame] = field(default_factory=weakref.WeakValueDictionary)
    ahead: set[FrameKey] = field(default_factory=set)
    """Frames that were regenerated and that backward has not reached."""
    output: weakref.ref[Tensor] | None = None
    phase: Phase = "steady"

    @property
    def alive(self) -> bool:
        return self.output is None or self.output() is not None


class Ledger:
    """The micro-batches of one chunk, oldest first."""

    def __init__(self, warmup: int = 0) -> None:
        self._warmup = warmup
        self._in_flight: deque[MicroBatch] = deque()
        self._last: Literal["forward", "backward", "nothing"] = "nothing"
        self._count = 0
        self._recording: MicroBatch | None = None
        self._in_forward = False
        self._entered: weakref.ref[Frame] | None = None
        self.ordinal = 0
        """Collectives that this half's backward has issued."""

    @property
    def entered(self) -> Frame | None:
        """The half whose backward runs. Held weakly: outside of Megatron's schedules nobody says when a backward is over."""
        return self._entered() if self._entered is not None else None

    @property
    def busy(self) -> bool:
        """Whether a micro-batch is between the beginning of its forward and the end of its backward."""
        waits = self._recording is not None and any(frame.waits for frame in self._recording.frames.values())
        return self._in_forward or waits or any(micro_batch.alive for micro_batch in self._in_flight)

    def begin_forward(self) -> None:
        self._in_forward = True
        while self._in_flight and not self._in_flight[0].alive:
            self._in_flight.popleft()  # its graph was dropped without a backward
        self._recording = self._opened()

    def end_forward(self, output: Any) -> None:
        tensor = next(tensors_in(output), None)
        if self._recording is not None and tensor is not None and tensor.requires_grad:
            self._recording.output = weakref.ref(tensor)
            self._in_flight.append(self._recording)
        self._recording = None
        self._in_forward = False
        self._last = "forward"

    def begin_backward(self, output: Any) -> MicroBatch | None:
        """The micro-batch that `output` came from, or None when it was not recorded."""
        micro_batch = self._of(output)
        if micro_batch is not None:
            micro_batch.phase = self._coming_phase
        self._last = "backward"
        self.leave()
        return micro_batch

    def end_backward(self, micro_batch: MicroBatch | None) -> None:
        if micro_batch is not None:
            self._in_flight.remove(micro_batch)
        self.leave()

    def abort(self) -> None:
        """The step failed: nothing of it is continued."""
        self._in_flight.clear()
        self._recording = None
        self._in_forward = False
        self._last = "nothing"
        self.leave()

    def micro_batch_for(self, key: FrameKey) -> MicroBatch:
        """The one that a frame recorded now belongs to. Outside of Megatron's schedules a repeated layer begins the next."""
        if self._recording is None or (self._recording.output is None and key in self._recording.frames):
            self._recording = self._opened()
        return self._recording

    def enter(self, frame: Frame) -> None:
        """Backward reaches a half."""
        self._entered = weakref.ref(frame)
        self.ordinal = 0
        frame.micro_batch.ahead.discard(frame.key)

    def leave(self) -> None:
        self._entered = None
        self.ordinal = 0

    def hidden_by_forward(self) -> MicroBatch | None:
        """Whose replays the collectives of the running forward hide: the micro-batch whose backward comes right behind it."""
        steady = self._warmup > 0 and len(self._in_flight) >= self._warmup
        return self._in_flight[0] if steady else None

    def hidden_by_receive(self) -> MicroBatch | None:
        """Whose replays a receive of a gradient hides, with its phase set."""
        if not self._in_flight:
            return None
        self._in_flight[0].phase = self._coming_phase
        return self._in_flight[0]

    @property
    def _coming_phase(self) -> Phase:
        return "steady" if self._last == "forward" else "cooldown"

    def _opened(self) -> MicroBatch:
        self._count += 1
        return MicroBatch(self._count - 1)

    def _of(self, output: Any) -> MicroBatch | None:
        tensor = next(tensors_in(output), None)
        return next((one for one in self._in_flight if one.output is not None and one.output() is tensor), None)
