"""Which passes are in flight, which one's backward runs, and which comes next.

    forward_step(i, chunk)   ──>  a MicroBatch opens; recorded halves put their frames into it
    a gradient is received   ──>  the next backward by the order of turns: its frames may be replayed now
    backward_step(output)    ──>  the MicroBatch whose forward gave that output

What comes next is the schedule's to say (`turns`). A micro-batch is recognised by the identity of its output tensor, which is
held weakly: holding an alias would keep memory that the schedule frees.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_lynx.anatomy.address import BackwardPhase, FrameKey
from megatron_lynx.runtime.saved import tensors_in
from megatron_lynx.runtime.turns import Place, Turns

if TYPE_CHECKING:
    from megatron_lynx.runtime.frame import Frame
    from megatron_lynx.runtime.offload import Shipment

Order = Callable[[int], Turns]
"""From the number of micro-batches of a step to what this stage does."""


@dataclass(eq=False)
class MicroBatch:
    """One forward of one chunk, until its backward is over. Frames belong to autograd's graph, so they are held weakly."""

    number: int
    """Counted from 0 over the whole run; the same for all chunks that it passes through."""
    index: int = 0
    """Counted from 0 in each step; where batches overlap, since the pipeline was filled."""
    chunk: int = 0
    frames: weakref.WeakValueDictionary[FrameKey, Frame] = field(default_factory=weakref.WeakValueDictionary)
    ahead: set[FrameKey] = field(default_factory=set)
    """Frames that were regenerated and that backward has not reached."""
    output: weakref.ref[Tensor] | None = None
    phase: BackwardPhase = "steady"
    shipment: Shipment | None = None
    """What of it goes to the host."""

    @property
    def place(self) -> Place:
        return self.index, self.chunk

    @property
    def alive(self) -> bool:
        return self.output is None or self.output() is not None


class Ledger:
    """The micro-batches in all chunks of a stage, oldest first."""

    def __init__(self, order: Order | None = None) -> None:
        self._order = order or (lambda microbatches: Turns(()))
        self._turns = Turns(())
        self._begun = 0
        """Backwards of this step."""
        self._overlapping = False
        """Whether batches overlap: then a batch is announced, and the first micro-batch of one begins nothing anew."""
        self._in_flight: dict[Place, MicroBatch] = {}
        self._first = self._count = 0
        """Number of this step's first micro-batch, and of the next one that opens."""
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
        return self._in_forward or waits or any(micro_batch.alive for micro_batch in self._in_flight.values())

    def begin_batch(self, turns: Turns, fills: bool) -> None:
        """A batch begins, of a schedule that does not empty the pipeline in between. `turns` begin with its first pass.

        `fills`: nothing is in flight, and micro-batches are counted from 0.
        """
        self._overlapping = True
        self._turns, self._begun = turns, 0
        if fills:
            self._first = self._count
            self._in_flight.clear()

    def begin_forward(self, index: int, chunk: int, microbatches: int) -> None:
        """Micro-batch `index` of `microbatches` goes through a chunk. The first one through the first chunk begins a step, unless
        batches overlap."""
        if self._overlapping:
            index = self._count - self._first
        elif (index, chunk) == (0, 0):
            self._turns, self._begun, self._first = self._order(microbatches), 0, self._count
            self._in_flight.clear()  # what is left had its graph dropped without a backward
        self._in_forward = True
        self._recording = MicroBatch(self._first + index, index, chunk)
        self._count = max(self._count, self._recording.number + 1)

    def end_forward(self, output: Any) -> MicroBatch | None:
        """The micro-batch that is in flight from now on, if a backward can come."""
        tensor = next(tensors_in(output), None)
        micro_batch, self._recording = self._recording, None
        self._in_forward = False
        if micro_batch is None or tensor is None or not tensor.requires_grad:
            return None
        micro_batch.output = weakref.ref(tensor)
        self._in_flight[micro_batch.place] = micro_batch
        return micro_batch

    def begin_backward(self, output: Any) -> MicroBatch | None:
        """The micro-batch that `output` came from, or None when it was not recorded."""
        self._tell_phase()
        self._begun += 1
        self.leave()
        return self._of(output)

    def end_backward(self, micro_batch: MicroBatch | None) -> None:
        if micro_batch is not None:
            del self._in_flight[micro_batch.place]
        self.leave()

    def abort(self) -> None:
        """The step failed: nothing of it is continued."""
        self._in_flight.clear()
        self._recording = None
        self._in_forward = False
        self._turns = Turns(())
        self.leave()

    def micro_batch_for(self, key: FrameKey, chunk: int = 0) -> MicroBatch:
        """The one that a frame recorded now belongs to. Outside of Megatron's schedules a repeated layer, or another chunk,
        begins the next."""
        recording = self._recording
        if not self._in_forward and (recording is None or recording.chunk != chunk or key in recording.frames):
            recording = self._recording = MicroBatch(self._count, self._count, chunk)
            self._count += 1
        assert recording is not None
        return recording

    def enter(self, frame: Frame) -> None:
        """Backward reaches a half."""
        self.leave()
        self._entered = weakref.ref(frame)
        frame.micro_batch.ahead.discard(frame.key)

    def leave(self) -> None:
        if self.entered is not None:
            self.entered.left()
        self._entered = None
        self.ordinal = 0

    def hidden_by_forward(self) -> MicroBatch | None:
        """Whose replays the collectives of the running forward hide: the micro-batch whose backward comes right behind it."""
        if not self._in_forward or self._recording is None:
            return None
        return self._living(self._turns.hidden_by(self._recording.place))

    def hidden_by_receive(self) -> MicroBatch | None:
        """Whose replays hide behind waiting for a gradient: the micro-batch whose backward comes next, with its phase set."""
        return self._tell_phase()

    def own_backward_follows(self, micro_batch: MicroBatch) -> bool:
        """Whether nothing comes between its forward and its backward."""
        return self._turns.at_once(micro_batch.place)

    def coming(self, ahead: int) -> MicroBatch | None:
        """The micro-batch whose backward begins after `ahead` others."""
        turn = self._turns.backward(self._begun + ahead)
        return self._living(turn.place) if turn is not None else None

    @property
    def recording_chunk(self) -> int:
        """The chunk whose forward runs."""
        return self._recording.chunk if self._recording is not None else 0

    def _tell_phase(self) -> MicroBatch | None:
        """The micro-batch whose backward comes next is told its phase."""
        turn = self._turns.backward(self._begun)
        micro_batch = self._living(turn.place if turn is not None else None)
        if micro_batch is not None and turn is not None:
            micro_batch.phase = "cooldown" if turn.phase == "cooldown" else "steady"
        return micro_batch

    def _living(self, place: Place | None) -> MicroBatch | None:
        micro_batch = self._in_flight.get(place) if place is not None else None
        return micro_batch if micro_batch is not None and micro_batch.alive else None

    def _of(self, output: Any) -> MicroBatch | None:
        tensor = next(tensors_in(output), None)
        return next((one for one in self._in_flight.values() if one.output is not None and one.output() is tensor), None)
