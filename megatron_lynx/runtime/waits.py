"""Runs planned work: the tasks of each moment of a pass, of which waits for communication are the windows.

    issue ──> [ collective in flight .......................... ]
    wait()    │ tasks in the window, on this stream              │ the wait proper │ tasks after it

    a collective of a half        fwd.*: serves the micro-batch whose backward is next        bwd.*: serves its own
    the receive of a gradient     pipe.recv_backward: serves the micro-batch that it is for

    backward enters a half        enter    checkpoints are recomputed; their communication begins ahead
    ... reaches its core          core     the same
    a wait for communication      in       recomputations and weight gradients, on this stream, without communication (rule R2)
    that wait is over             after    inputs are gathered; communication of checkpoints begins ahead

A hook that returns a `Work` returns a `WindowedWork` instead. `Waits.reach` is the only place that runs planned work. The table
(`timetable.Pass`) depends on the plan only (rule R1), and is equal on all ranks of a group. A task that finds nothing to do is
skipped. Work that no moment did runs on demand (rule R5), or is flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.anatomy.address import RECV_BACKWARD, FrameKey, Window, WindowAddress
from megatron_lynx.nest import first_in
from megatron_lynx.runtime.frame import Frame, MicroBatch
from megatron_lynx.runtime.progress import Progress, Run
from megatron_lynx.runtime.recompute import Recomputations
from megatron_lynx.runtime.saved import storage_of
from megatron_lynx.runtime.weight_gradients import WeightGradients
from megatron_lynx.timeline import SpanKind
from megatron_lynx.timetable import Pass, Task, Timetable
from megatron_lynx.timetable.events import At


class Reached(NamedTuple):
    at: At
    place: FrameKey | Window
    micro_batch: MicroBatch | None
    """The one whose backward is served; None if no backward follows."""
    gradients: Any = None
    """At `enter`: gradients of the half's output."""


class WindowedWork:
    """A `Work` whose first wait runs a window."""

    def __init__(self, work: Any, window: Callable[[Callable[[], Any]], Any]) -> None:
        self._work = work
        self._window: Callable[[Callable[[], Any]], Any] | None = window

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        window, self._window = self._window, None
        if window is None:
            return self._work.wait(*args, **kwargs)
        return window(lambda: self._work.wait(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Waits:
    """The planned work and the windows of one engine. `ahead_depths`: by chunk, the most halves recomputed ahead (rule R4)."""

    def __init__(
        self,
        progress: Progress,
        timetable: Timetable,
        ahead_depths: Sequence[int],
        recomputes: Recomputations,
        weight_gradients: WeightGradients,
    ) -> None:
        self.timetable = timetable
        self._progress = progress
        self._ledger = progress.ledger
        self._ahead_depths = ahead_depths
        self._recomputations = recomputes
        self._weight_gradients = weight_gradients

    # --- windows -------------------------------------------------------------------------------------------------------

    def window(self, *, exchange: bool = False) -> Callable[[Any], Any] | None:
        """Return what makes a window of the `Work` of a collective, or of an `exchange` of tokens, that is about to be issued.

        Returns None outside of halves, in halves without windows, and for windows without tasks.
        """
        scope = self._progress.scope
        if scope is not None and scope.recomputes:
            return scope.window(exchange=exchange)
        frame = scope.frame if scope is not None else self._ledger.entered
        if frame is None or not (frame.policy.section.exchanges if exchange else frame.policy.section.has_windows):
            return None
        address, micro_batch, through = self._in_forward(scope) if scope is not None else self._in_backward(frame)
        if address not in through.busy and not self._progress.trace.enabled:
            return None
        return lambda work: WindowedWork(work, lambda proper: self._window(through, address, micro_batch, proper))

    def gathered_gradient(self, gradient: Tensor) -> tuple[Tensor, Any] | None:
        """Return (gathered gradient, its `Work`) if this gradient's gather was started before."""
        frame = self._ledger.entered if self._progress.scope is None else None
        begun = None if frame is None else frame.take_gathered_gradient(gradient)
        if begun is None:
            return None
        window = self.window()
        return begun.whole.view(-1, *gradient.shape[1:]), begun.work if window is None else window(begun.work)

    def receive(self, works: list[Any]) -> list[Any]:
        """Wrap the works of a pipeline exchange that receives a gradient: the first wait runs the window.

        The window's micro-batch is looked up then: interleaved schedules post receives ahead of time, and wait for each before
        its backward.
        """
        pending = [True]

        def window(proper: Callable[[], Any]) -> Any:
            micro_batch = self._ledger.hidden_by_receive() if pending else None
            pending.clear()
            if micro_batch is None:
                return proper()
            with self._progress.aborting():
                self._progress.offloader.gradient_awaited(self._ledger)
                through = self.timetable.receive(micro_batch.chunk, micro_batch.phase)
                return self._window(through, RECV_BACKWARD, micro_batch, proper)

        return [WindowedWork(work, window) for work in works]

    def gathered_input(self) -> Any:
        """Return the buffer of the gathered input, if its gather was started."""
        gathering = self._gathering
        return gathering[0] if gathering is not None else None

    def started_gather(self, output: Any) -> Any:
        """Return the `Work` that gathers into `output`, if a frame started it. It counts as a collective of the half."""
        gathering = self._gathering
        if gathering is None:
            return None
        if gathering[0] is not output and storage_of(gathering[0]) != storage_of(output):
            return None
        if self._progress.scope is not None:
            return gathering[1]
        frame = self._ledger.entered
        self._ledger.ordinal += 1
        return gathering[1] if frame is None or frame.on_gathered is None else _reporting_gathered(frame.on_gathered, *gathering)

    @property
    def _gathering(self) -> tuple[Any, Any] | None:
        """The gathered input of the half whose backward runs; in a recomputation only at the site that reads it."""
        if (scope := self._progress.scope) is not None:
            return scope.gathering
        frame = self._ledger.entered
        return frame.gathering if frame is not None else None

    def _in_forward(self, scope: Run) -> tuple[WindowAddress, MicroBatch | None, Pass]:
        """Address of a forward's collective, the micro-batch that its window serves, and the pass."""
        address = WindowAddress("fwd", *scope.frame.key, scope.collectives)
        scope.collectives += 1
        needs_micro_batch = self.timetable.in_forwards or self._progress.trace.enabled
        micro_batch = self._ledger.hidden_by_forward() if needs_micro_batch else None
        serving = None if micro_batch is None else micro_batch.chunk
        return address, micro_batch, self.timetable.forward(scope.frame.policy.chunk, serving)

    def _in_backward(self, entered: Frame) -> tuple[WindowAddress, MicroBatch, Pass]:
        """Address of a backward's collective, its micro-batch and the pass."""
        address = WindowAddress("bwd", *entered.key, self._ledger.ordinal)
        self._ledger.ordinal += 1
        return address, entered.micro_batch, self.backward_of(entered.micro_batch)

    def _window(self, through: Pass, window: Window, micro_batch: MicroBatch | None, proper: Callable[[], Any]) -> Any:
        """`proper`: the wait itself."""
        kind: SpanKind = "recv" if window == RECV_BACKWARD else "window"
        begin = self._progress.trace.now()
        self.reach(through, Reached("in", window, micro_batch))
        waited = proper()
        if begin is not None:
            number = micro_batch.number if micro_batch else None
            self._progress.trace.add(kind, begin, micro_batch=number, window=str(window))
        self.reach(through, Reached("after", window, micro_batch))
        return waited

    # --- tasks ---------------------------------------------------------------------------------------------------------

    def reach(self, through: Pass, reached: Reached) -> None:
        """Run the tasks of a moment."""
        for task in through.at(reached.at, reached.place):
            if task.do == "recompute":
                self._recompute(task, reached)
            elif task.do == "begin":
                self._begin(task, reached)
            elif task.do == "gather":
                self._gather(task, reached)
            else:
                layer, _, name = task.linear
                self._weight_gradients.run((layer, name), str(reached.place))

    def backward_of(self, micro_batch: MicroBatch) -> Pass:
        return self.timetable.backward(micro_batch.chunk, micro_batch.phase)

    def _recompute(self, task: Task, reached: Reached) -> None:
        """At `enter`, recompute a checkpoint; the half before that feeds it is recomputed with it. In a window, recompute if rule
        R4 allows it and the gather of its input was not missed."""
        frame = self._frame_of(task, reached)
        if frame is None:
            return
        if reached.at == "enter":
            if not frame.policy.feeds:
                self._recomputations.on_demand(frame)
        elif not self._recomputations.would_gather(frame, task.item) and self._has_room_for(frame):
            self._recomputations.recompute(frame, str(reached.place), task.item)
            self._progress.counts.in_windows += frame.recomputed

    def _begin(self, task: Task, reached: Reached) -> None:
        """Start communication of a checkpoint. On entering its half, also gather the gradient, after the input."""
        frame = self._frame_of(task, reached)
        if frame is None or task.item is None:
            return
        entered = frame.key == reached.place
        if entered and not frame.policy.section.exchanges:
            window = str(WindowAddress("bwd", *frame.key, 0))
            self._recomputations.beside_gradient(frame, first_in(Tensor, reached.gradients), window)
            return
        self._recomputations.begin(frame, task.item)
        self._progress.counts.ahead += not entered

    def _gather(self, task: Task, reached: Reached) -> None:
        frame = self._frame_of(task, reached)
        if frame is not None and frame.gathering is None:
            begin = self._progress.trace.now()
            self._recomputations.gather(frame)
            self._progress.add_span("gather", frame, str(reached.place), begin)

    def _frame_of(self, task: Task, reached: Reached) -> Frame | None:
        """Return the frame of a task's half if it is still to be recomputed."""
        if reached.micro_batch is None:
            return None
        frame = self._ledger.frame_of(reached.micro_batch, task.half)
        return frame if frame is not None and frame.lets_go else None

    def _has_room_for(self, frame: Frame) -> bool:
        """Return whether this half may be recomputed by now (rule R4). It counts as ahead until backward reaches it."""
        ahead, counts = frame.micro_batch.ahead, self._progress.counts
        if frame is self._ledger.entered or frame.key in ahead:
            return True
        if len(ahead) >= self._ahead_depths[frame.micro_batch.chunk]:
            return False
        ahead.add(frame.key)
        counts.live_ahead = max(counts.live_ahead, len(ahead))
        return True


def _reporting_gathered(on_gathered: Callable[[Tensor], None], gathered: Tensor, work: Any) -> WindowedWork:
    """Report the gathered input after the wait, before its use."""

    def wait_and_report(wait: Callable[[], Any]) -> Any:
        waited = wait()
        on_gathered(gathered)
        return waited

    return WindowedWork(work, wait_and_report)
