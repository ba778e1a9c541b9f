"""Which passes of this stage are in flight, which backward runs, which is next, and what was counted.

The ledger follows the order of passes, which the installer supplies, and finds a backward's micro-batch by the identity of its
forward's output. Where batches overlap (`double_buffered`), each batch's begin is reported, and micro-batches are counted since
the pipeline was last filled.

If a step fails, the innermost call notes on the error where the engine was (`whereabouts_of`): the engine forgets failed steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.figures import Figures
from megatron_lynx.nest import first_in
from megatron_lynx.runtime.device import Clock, Device, Event, Trace
from megatron_lynx.runtime.frame import Frame, MicroBatch, Run
from megatron_lynx.runtime.offload import Offloader
from megatron_lynx.schedule.schedule import Action, Phase, VirtualMicroBatch
from megatron_lynx.timeline import SpanKind


class StageOrder:
    def __init__(
        self,
        passes: Sequence[tuple[Action, Phase]],
        completing: Container[VirtualMicroBatch] | None = None,
        *,
        in_turns: bool = False,
    ) -> None:
        """`in_turns`: each backward of the one chunk overlaps the next micro-batch's forward, layer by layer."""
        self.all, self.in_turns = tuple(passes), in_turns
        self.backwards = tuple((action, phase) for action, phase in passes if action.kind == "B")
        self.completing = {one.chunk: one.virtual for one, _ in self.backwards}.values() if completing is None else completing
        """Backwards after which gradients may be read: the last ones that add to them."""
        forwards = [(one, phase, after) for (one, phase), (after, _) in pairwise(passes) if one.kind + after.kind == "FB"]
        at_once = {one.virtual for one, _, after in forwards if one.virtual == after.virtual}
        self.at_once = {one.virtual for one, _ in passes} if in_turns else at_once
        """Forwards whose own backward follows them."""
        self.before_other = {one.virtual for one, phase, _ in forwards if phase == "steady"} - at_once
        """Steady forwards that another micro-batch's backward follows."""


OrderOfStep = Callable[[int], StageOrder]
"""From the number of micro-batches of a step to this stage's order of passes."""


class Ledger:
    def __init__(self, order_of_step: OrderOfStep | None = None) -> None:
        self._order_of_step = order_of_step or (lambda microbatches: StageOrder(()))
        self._order = StageOrder(())
        self._begun = 0
        self.running: Action | None = None
        self.sending: tuple[int, bool] | None = None
        """(chunk, whether its gradients may be read then) of the backward whose input's gradient is sent next."""
        self._overlapping = False
        self._in_flight: dict[VirtualMicroBatch, MicroBatch] = {}
        self._frames: weakref.WeakValueDictionary[tuple[int, FrameKey], Frame] = weakref.WeakValueDictionary()
        """Living frames by (micro-batch number, half). Autograd's graph owns them."""
        self._first = self._count = 0
        self.recording: MicroBatch | None = None
        self.in_forward = False
        self._entered: weakref.ref[Frame] | None = None
        self.ordinal = 0
        """Collectives that this half's backward has issued."""

    @property
    def entered(self) -> Frame | None:
        """The half whose backward runs. Weak: outside of Megatron's schedules the end of a backward is not reported."""
        return self._entered() if self._entered is not None else None

    @property
    def busy(self) -> bool:
        """Whether a micro-batch is between the begin of its forward and the end of its backward."""
        recorded = (frame for frame in self._frames.values() if frame.micro_batch is self.recording)
        waits = any(frame.lets_go or frame.results for frame in recorded)
        return self.in_forward or waits or any(micro_batch.alive for micro_batch in self._in_flight.values())

    @property
    def expects_backward(self) -> bool:
        """Whether the step has a backward to come; True if its order is not known."""
        return self._overlapping or not self._order.all or self._begun < len(self._order.backwards)

    def begin_batch(self, order: StageOrder, fills: bool) -> None:
        """Begin a batch without draining the pipeline before. `fills`: nothing is in flight; micro-batches are counted from 0."""
        self._overlapping = True
        self._order, self._begun = order, 0
        if fills:
            self._first = self._count
            self._in_flight.clear()

    def begin_forward(self, index: int, chunk: int, microbatches: int) -> bool:
        """Begin a forward, `index` of `microbatches` in the step. Returns whether it begins a step."""
        begins = not self._overlapping and (index, chunk) == (0, 0)
        if self._overlapping:
            index = self._count - self._first
        elif begins:
            self._order, self._begun, self._first = self._order_of_step(microbatches), 0, self._count
            self._in_flight.clear()  # leftovers had their graph dropped without a backward
        self.in_forward = True
        self.recording = MicroBatch(self._first + index, index, chunk, (index, chunk) in self._order.at_once)
        self._count = max(self._count, self.recording.number + 1)
        return begins

    def end_forward(self, output: Any) -> MicroBatch | None:
        """End the forward. Returns the micro-batch if a backward can come."""
        tensor = first_in(Tensor, output)
        micro_batch, self.recording = self.recording, None
        self.in_forward = False
        if micro_batch is None or tensor is None or not tensor.requires_grad:
            return None
        micro_batch.output = weakref.ref(tensor)
        self._in_flight[micro_batch.virtual] = micro_batch
        return micro_batch

    def begin_backward(self, output: Any) -> MicroBatch | None:
        """Begin a backward. Returns the micro-batch of `output`, or None if it was not recorded."""
        self.running = self._order.backwards[self._begun][0] if self._begun < len(self._order.backwards) else None
        self._begun += 1
        self.leave()
        tensor = first_in(Tensor, output)
        return next((one for one in self._in_flight.values() if one.output is not None and one.output() is tensor), None)

    def end_backward(self, micro_batch: MicroBatch | None, *, sends: bool = False) -> None:
        """End the backward. `sends`: the gradient of its input is sent next."""
        if micro_batch is not None:
            del self._in_flight[micro_batch.virtual]
        self.sending = (self.running.chunk, self.completes_gradients) if sends and self.running is not None else None
        self.running = None
        self.leave()

    def abort(self) -> None:
        self._in_flight.clear()
        self.recording = None
        self.in_forward = False
        self._order = StageOrder(())
        self.running = self.sending = None
        self.leave()

    def micro_batch_for(self, key: FrameKey, chunk: int = 0) -> MicroBatch:
        """Return the micro-batch of a new frame. Outside of Megatron's schedules a repeated layer or another chunk begins one."""
        recording = self.recording
        if not self.in_forward and (recording is None or recording.chunk != chunk or self.frame_of(recording, key)):
            recording = self.recording = MicroBatch(self._count, self._count, chunk)
            self._count += 1
        assert recording is not None
        return recording

    def keep(self, frame: Frame) -> None:
        self._frames[frame.micro_batch.number, frame.key] = frame

    def frame_of(self, micro_batch: MicroBatch, key: FrameKey) -> Frame | None:
        return self._frames.get((micro_batch.number, key))

    def enter(self, frame: Frame) -> None:
        self.leave()
        self._entered = weakref.ref(frame)

    def leave(self) -> None:
        if self._entered is not None:
            if (frame := self._entered()) is not None:
                frame.left()
            self._entered = None
        self.ordinal = 0

    @property
    def before_other(self) -> bool:
        return self.recording is not None and self.recording.virtual in self._order.before_other

    def in_flight_beside(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        """Return the other micro-batches between forward and backward. They are equal on all ranks of a stage."""
        return [other for other in self._in_flight.values() if other is not micro_batch]

    @property
    def completes_gradients(self) -> bool:
        return self.running is not None and self.running.virtual in self._order.completing

    @property
    def drains(self) -> bool:
        """Whether the running backward is in cool-down, or its chunk's last."""
        running = self._order.backwards[self._begun - 1 : self._begun] if self.running is not None else ()
        return any(phase == "cooldown" for _, phase in running) or self.completes_gradients

    @property
    def coming(self) -> MicroBatch | None:
        """The micro-batch whose backward begins next."""
        coming = self._order.backwards[self._begun : self._begun + 1]
        micro_batch = self._in_flight.get(coming[0][0].virtual) if coming else None
        return micro_batch if micro_batch is not None and micro_batch.alive else None


_NAME = "_megatron_lynx_whereabouts"


@dataclass(frozen=True)
class Whereabouts:
    passing: Literal["forward", "backward"]
    micro_batch: int | None = None
    """Counted from 0 in the step. Is None if it was not recorded."""
    chunk: int = 0
    half: FrameKey | None = None
    recomputes: bool = False
    expert_load: float = 0.0


def note(error: BaseException, where: Whereabouts) -> None:
    """Attach the whereabouts to an error, unless an inner call has."""
    if whereabouts_of(error) is None:
        setattr(error, _NAME, where)


def whereabouts_of(error: BaseException) -> Whereabouts | None:
    """Return where an error was raised; None for errors from outside of a pass."""
    return getattr(error, _NAME, None)


class Progress:
    """State that the parts of one engine share."""

    def __init__(self, ledger: Ledger, offloader: Offloader, device: Device) -> None:
        self.ledger = ledger
        self.offloader = offloader
        self.trace: Trace = offloader.trace
        self.clock = Clock(device)
        self.counts = Figures()
        self.scope: Run | None = None

    @property
    def in_backward_of(self) -> Frame | None:
        """The half whose backward runs; None inside the call of a half, which may be a recomputation."""
        return self.ledger.entered if self.scope is None else None

    def whereabouts(self, backward_of: MicroBatch | None = None) -> Whereabouts:
        scope = self.scope
        frame = scope.frame if scope is not None else self.ledger.entered
        micro_batch = frame.micro_batch if frame is not None else backward_of or self.ledger.recording
        return Whereabouts(
            passing="forward" if self.ledger.in_forward else "backward",
            micro_batch=micro_batch.index if micro_batch is not None else None,
            chunk=micro_batch.chunk if micro_batch is not None else 0,
            half=frame.key if frame is not None else None,
            recomputes=scope is not None and scope.recomputes,
            expert_load=self.counts.expert_load,
        )

    def take_counts(self, *, exact: bool = True) -> Figures:
        """Return the figures since the last call; `exact` as in `Clock.take`."""
        counts, self.counts = self.counts, Figures()
        counts.offloaded_bytes, counts.reloaded_bytes = (copier.take_bytes() for copier in self.offloader.copiers)
        counts.exposed_copy_s = sum(copier.take_waited_s(exact=exact) for copier in self.offloader.copiers)
        counts.host_bytes = self.offloader.memory.bytes
        return counts

    def run(self, scope: Run, *given: Any) -> Any:
        outer, self.scope = self.scope, scope
        try:
            return scope.run(*given)
        except BaseException as error:
            note(error, self.whereabouts())
            raise
        finally:
            self.scope = outer

    @contextmanager
    def recomputing(self, frame: Frame, window: str) -> Iterator[None]:
        begin, clocked = self.trace.begin(), self.clock.begin()
        yield
        self.clock.end(window, clocked)
        self.add_span("recompute", frame, begin, window)

    def add_span(self, kind: SpanKind, frame: Frame, begin: Event | None, window: str = "") -> None:
        if begin is not None:
            self.trace.add(kind, begin, frame.key, frame.micro_batch.number, window)
