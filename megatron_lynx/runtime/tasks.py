"""Runs the tasks that the plan has for each moment of a pass.

    backward enters a half        enter    checkpoints are recomputed; their communication begins ahead
    ... reaches its core          core     the same
    a wait for communication      in       recomputations and weight gradients, on this stream, without communication (rule R2)
    that wait is over             after    inputs are gathered; communication of checkpoints begins ahead

`reach` is the only place that runs planned work. The table (`timetable.Pass`) depends on the plan only (rule R1), and is equal on
all ranks of a group. A task that finds nothing to do is skipped. Work that no moment did runs on demand (rule R5), or is flushed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey, Window, WindowAddress
from megatron_lynx.nest import first_in
from megatron_lynx.runtime.frame import Frame, MicroBatch
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.replay import Replays
from megatron_lynx.runtime.weight_gradients import WeightGradients
from megatron_lynx.timetable import Pass, Task, Timetable
from megatron_lynx.timetable.events import At


class Reached(NamedTuple):
    at: At
    place: FrameKey | Window
    micro_batch: MicroBatch | None
    """The one whose backward is served; None if no backward follows."""
    gradients: Any = None
    """At `enter`: gradients of the half's output."""


class Tasks:
    """The planned work of one engine. `ahead_depths`: by chunk, how many halves of a micro-batch may be recomputed before
    backward reaches
    them (rule R4).
    """

    def __init__(
        self,
        progress: Progress,
        timetable: Timetable,
        ahead_depths: Sequence[int],
        replays: Replays,
        weight_gradients: WeightGradients,
    ) -> None:
        self.timetable = timetable
        self._progress = progress
        self._ledger = progress.ledger
        self._ahead_depths = ahead_depths
        self._replays = replays
        self._weight_gradients = weight_gradients

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
        R4 allows it
        and the gather of its input was not missed.
        """
        frame = self._frame_of(task, reached)
        if frame is None:
            return
        if reached.at == "enter":
            if not frame.policy.feeds:
                self._replays.on_demand(frame)
        elif not self._replays.would_gather(frame, task.item) and self._has_room_for(frame):
            self._replays.replay(frame, str(reached.place), task.item)
            self._progress.counts.in_windows += frame.replayed

    def _begin(self, task: Task, reached: Reached) -> None:
        """Start communication of a checkpoint. For the half that backward enters, gather the gradient after the input and
        recompute
        meanwhile.
        """
        frame = self._frame_of(task, reached)
        if frame is None or task.item is None:
            return
        own = frame.key == reached.place
        if own and not frame.policy.section.exchanges:
            window = str(WindowAddress("bwd", *frame.key, 0))
            self._replays.beside_gradient(frame, first_in(Tensor, reached.gradients), window)
            return
        self._replays.begin(frame, task.item)
        self._progress.counts.ahead += not own

    def _gather(self, task: Task, reached: Reached) -> None:
        frame = self._frame_of(task, reached)
        if frame is not None and frame.gathering is None:
            begin = self._progress.trace.now()
            self._replays.gather(frame)
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
