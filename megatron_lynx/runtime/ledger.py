"""Which passes are in flight on this stage, which one's backward runs, and which comes next.

Whoever replays ahead of time must know for whom: the ledger follows the passes that Megatron runs, by the order that the schedule
has for this stage (`stage_order`).

    forward_step(i, chunk)   ──>  a micro-batch begins; its recorded halves enter their frames
    a gradient is received   ──>  the next backward by the order of the stage: its frames may be replayed now
    backward_step(output)    ──>  the micro-batch whose forward gave that output, recognised by the tensor's identity

Where batches overlap, micro-batches of the next batch run before this one is over. Such a schedule (`double_buffered`) runs the
batches instead of Megatron's functions, so it tells where one begins, and under which weights a replay has to run:

    a batch begins           ──>  begin_batch(order, fills=); micro-batches are counted since the pipeline was last filled
    a replay of i            ──>  as_recorded(i): the weights are those of micro-batch i while it runs
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.nest import first_in
from megatron_lynx.runtime.frame import Frame, MicroBatch
from megatron_lynx.runtime.stage_order import OrderOfStep, ScheduledPass, StageOrder, VirtualMicroBatch


class Ledger:
    """The micro-batches in flight in all chunks of a stage, and their frames."""

    def __init__(self, order_of_step: OrderOfStep | None = None) -> None:
        self._order_of_step = order_of_step or (lambda microbatches: StageOrder(()))
        self._order = StageOrder(())
        self._begun = 0
        """Backwards of this step that have begun."""
        self.running: ScheduledPass | None = None
        """The backward that runs, where the order of the step knows it."""
        self._overlapping = False
        """Whether batches overlap: then a batch is announced, and the first micro-batch of one begins nothing anew."""
        self._in_flight: dict[VirtualMicroBatch, MicroBatch] = {}
        self._frames: weakref.WeakValueDictionary[tuple[int, FrameKey], Frame] = weakref.WeakValueDictionary()
        """All that live, by number of the micro-batch and half. Frames belong to autograd's graph, so they are held weakly."""
        self._first = self._count = 0
        """Number of this step's first micro-batch, and of the next one that begins."""
        self._recording: MicroBatch | None = None
        self._in_forward = False
        self._entered: weakref.ref[Frame] | None = None
        self.ordinal = 0
        """How many collectives this half's backward has issued."""

    @property
    def entered(self) -> Frame | None:
        """The half whose backward runs. Held weakly: outside of Megatron's schedules nobody says when a backward is over."""
        return self._entered() if self._entered is not None else None

    @property
    def busy(self) -> bool:
        """Whether a micro-batch is between the beginning of its forward and the end of its backward."""
        waits = any(frame.waits for frame in self._frames.values() if frame.micro_batch is self._recording)
        return self._in_forward or waits or any(micro_batch.alive for micro_batch in self._in_flight.values())

    @property
    def expects_backward(self) -> bool:
        """Whether the step under way has a backward to come. Without an order nobody knows."""
        return self._overlapping or not self._order.all or self._order.backward(self._begun) is not None

    def begin_batch(self, order: StageOrder, fills: bool) -> None:
        """A batch begins, of a schedule that does not empty the pipeline in between. `order` begins with its first pass.

        `fills`: nothing is in flight, and micro-batches are counted from 0.
        """
        self._overlapping = True
        self._order, self._begun = order, 0
        if fills:
            self._first = self._count
            self._in_flight.clear()

    def begin_forward(self, index: int, chunk: int, microbatches: int) -> bool:
        """Micro-batch `index` of `microbatches` goes through a chunk. The first one through the first chunk begins a step, unless
        batches overlap: whether it does."""
        begins = not self._overlapping and (index, chunk) == (0, 0)
        if self._overlapping:
            index = self._count - self._first
        elif begins:
            self._order, self._begun, self._first = self._order_of_step(microbatches), 0, self._count
            self._in_flight.clear()  # what is left had its graph dropped without a backward
        self._in_forward = True
        self._recording = MicroBatch(self._first + index, index, chunk)
        self._count = max(self._count, self._recording.number + 1)
        return begins

    def end_forward(self, output: Any) -> MicroBatch | None:
        """The micro-batch that is in flight from now on, if a backward can come."""
        tensor = first_in(Tensor, output)
        micro_batch, self._recording = self._recording, None
        self._in_forward = False
        if micro_batch is None or tensor is None or not tensor.requires_grad:
            return None
        micro_batch.output = weakref.ref(tensor)
        self._in_flight[micro_batch.virtual] = micro_batch
        return micro_batch

    def begin_backward(self, output: Any) -> MicroBatch | None:
        """The micro-batch that `output` came from, or None when it was not recorded."""
        self.hidden_by_receive()
        self.running = self._order.backward(self._begun)
        self._begun += 1
        self.leave()
        return self._of(output)

    def end_backward(self, micro_batch: MicroBatch | None) -> None:
        if micro_batch is not None:
            del self._in_flight[micro_batch.virtual]
        self.running = None
        self.leave()

    def abort(self) -> None:
        """Forget a step that failed: nothing of it is continued."""
        self._in_flight.clear()
        self._recording = None
        self._in_forward = False
        self._order = StageOrder(())
        self.running = None
        self.leave()

    def micro_batch_for(self, key: FrameKey, chunk: int = 0) -> MicroBatch:
        """The micro-batch that a frame recorded now belongs to. Outside of Megatron's schedules a repeated layer, or another
        chunk, begins the next."""
        recording = self._recording
        if not self._in_forward and (recording is None or recording.chunk != chunk or self.frame_of(recording, key)):
            recording = self._recording = MicroBatch(self._count, self._count, chunk)
            self._count += 1
        assert recording is not None
        return recording

    def keep(self, frame: Frame) -> None:
        """Remember the frame of a half that is being recorded, for as long as the graph owns it."""
        self._frames[frame.micro_batch.number, frame.key] = frame

    def frame_of(self, micro_batch: MicroBatch, key: FrameKey) -> Frame | None:
        """What was recorded of a half of this micro-batch, if its graph still lives."""
        return self._frames.get((micro_batch.number, key))

    def enter(self, frame: Frame) -> None:
        """Backward reaches a half, and so has left the one before."""
        self.leave()
        self._entered = weakref.ref(frame)
        frame.micro_batch.ahead.discard(frame.key)

    def leave(self) -> None:
        if self._entered is not None:
            if (frame := self._entered()) is not None:
                frame.left()
            self._entered = None
        self.ordinal = 0

    def hidden_by_forward(self) -> MicroBatch | None:
        """The micro-batch whose replays the running forward's collectives hide: the one whose backward comes right behind it."""
        if not self._in_forward or self._recording is None:
            return None
        return self._living(self._order.hidden_by(self._recording.virtual))

    def hidden_by_receive(self) -> MicroBatch | None:
        """The micro-batch whose replays hide while a gradient is awaited: the one whose backward is next, told its phase."""
        micro_batch, backward = self.coming(0), self._order.backward(self._begun)
        if micro_batch is not None and backward is not None:
            micro_batch.phase = backward.phase
        return micro_batch

    def in_flight_beside(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        """Those whose forward is over and whose backward is not, but this one. Equal on all ranks of a stage: it follows from the
        order of passes alone."""
        return [each for each in self._in_flight.values() if each is not micro_batch]

    @property
    def completes_gradients(self) -> bool:
        """Whether gradients may be read right behind the backward that runs."""
        return self.running is not None and self._order.completes_gradients(self.running.virtual)

    def own_backward_follows(self, micro_batch: MicroBatch) -> bool:
        """Whether nothing comes between its forward and its backward."""
        return self._order.at_once(micro_batch.virtual)

    def coming(self, ahead: int) -> MicroBatch | None:
        """The micro-batch whose backward begins after `ahead` others."""
        backward = self._order.backward(self._begun + ahead)
        return self._living(backward.virtual) if backward is not None else None

    @property
    def in_forward(self) -> bool:
        """Whether a forward runs."""
        return self._in_forward

    @property
    def recording(self) -> MicroBatch | None:
        """The micro-batch whose forward runs."""
        return self._recording

    def _living(self, virtual: VirtualMicroBatch | None) -> MicroBatch | None:
        micro_batch = self._in_flight.get(virtual) if virtual is not None else None
        return micro_batch if micro_batch is not None and micro_batch.alive else None

    def _of(self, output: Any) -> MicroBatch | None:
        tensor = first_in(Tensor, output)
        return next((one for one in self._in_flight.values() if one.output is not None and one.output() is tensor), None)


class BatchListener(Protocol):
    """An engine, as far as such a schedule calls it."""

    def begin_batch(self, order: StageOrder, *, fills: bool) -> None:
        """A batch begins. `order` starts with its first pass; `fills`: nothing is in flight."""
        ...


class Overlapping(Protocol):
    """Runs the batches of one stage."""

    def few_batches(self, microbatches: int) -> StageOrder:
        """What the stage does from filling the pipeline to draining it; as many batches as show everything."""
        ...

    def as_recorded(self, micro_batch: int) -> AbstractContextManager[None]:
        """Inside, the parameters are what the forward of this micro-batch saw."""
        ...

    def check_drained(self, what: str) -> None:
        """Raises `HookRefused` where micro-batches are in flight."""
        ...

    def under(self, engine: BatchListener | None) -> None:
        """From now on, tell this engine (or none) when a batch begins."""
        ...
