"""Waits for communication: each is a window, in which the tasks run that the plan has put there (`runtime.windows`).

a collective of a half        fwd.*: serves the micro-batch whose backward comes next     bwd.*: serves its own
the receive of a gradient     pipe.recv_backward: serves the micro-batch that it is for

Behind the replays, weight gradients that are pending run: of whichever micro-batch, and in a forward of whichever chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.anatomy.address import RECV_BACKWARD, BackwardPhase, Window, WindowAddress
from megatron_lynx.runtime.frame import MicroBatch
from megatron_lynx.runtime.progress import HalfCall, Progress
from megatron_lynx.runtime.refusals import collective_in_replay
from megatron_lynx.runtime.replay import Replayer, Replays
from megatron_lynx.runtime.saved import storage_of
from megatron_lynx.runtime.task import Opening, Task
from megatron_lynx.runtime.trace import SpanKind
from megatron_lynx.runtime.weight_gradients import WeightGradients
from megatron_lynx.runtime.windows import WindowedWork, Windows


class _Tasks(NamedTuple):
    """What runs in one window."""

    during: tuple[Task, ...]
    """Before the wait proper."""
    filling: tuple[Task, ...]
    """Weight gradients, behind these."""
    behind: tuple[Task, ...]
    """When the wait is over."""


class _Done:
    """The `Work` of a gather that was over long ago."""

    def wait(self) -> bool:
        return True


DONE = _Done()


class Waits:
    """All windows of one engine. `windows`, by chunk, say which tasks run where."""

    def __init__(
        self, progress: Progress, windows: Sequence[Windows], replays: Replays, weight_gradients: WeightGradients
    ) -> None:
        self._progress = progress
        self._ledger = progress.ledger
        self._windows = windows
        self._replays = replays
        self._in_forwards = any(chunk.in_forwards for chunk in windows)
        self._weight_gradients = weight_gradients
        self._fillers = _fillers(windows)

    def window(self, *, exchange: bool = False) -> Callable[[Any], WindowedWork] | None:
        """A collective of the tensor-parallel group, or an `exchange` of tokens, is about to be issued: what makes a window of
        its `Work`.

        None where it is issued outside of a half, or in one whose collectives are no windows, or where nothing happens in its
        window: then it may be issued as it comes. A replay must not communicate (rule R2).
        """
        scope = self._progress.scope
        if isinstance(scope, Replayer):
            raise collective_in_replay(scope.frame.policy.name)
        frame = scope.frame if scope is not None else self._ledger.entered
        if frame is None or not (frame.policy.section.exchanges if exchange else frame.policy.section.has_windows):
            return None
        address, micro_batch, phase = self._in_forward(scope) if scope is not None else self._in_backward()
        if address is None:
            return None
        tasks = self._tasks(address, micro_batch, phase)
        if not any(tasks) and not self._progress.trace.enabled:
            return None
        return lambda work: WindowedWork(work, lambda wait: self._window(address, micro_batch, tasks, wait))

    def _tasks(self, window: Window, micro_batch: MicroBatch | None, phase: BackwardPhase) -> _Tasks:
        """What the plan has put into a window. Weight gradients of a receive are those of the chunk whose gradient it is."""
        fillers = self._fillers.get(window, ())
        if micro_batch is None:
            return _Tasks((), fillers, ())
        own, running = self._windows[micro_batch.chunk], self._windows[self._ledger.recording_chunk]
        if window == RECV_BACKWARD:
            fillers = own.weight_gradients.get(window, ())
        return _Tasks(own.tasks_during(window, phase, running), fillers, own.tasks_behind(window, phase, running))

    def receive(self, works: list[Any]) -> list[Any]:
        """Works of a pipeline exchange that receives a gradient: whichever is waited for first runs the window.

        Whose window it is may be known only then: interleaved schedules ask for gradients ahead of time, and wait for each one
        right before its backward.
        """
        pending = [True]

        def window(wait: Callable[[], Any]) -> Any:
            micro_batch = self._ledger.hidden_by_receive() if pending else None
            pending.clear()
            if micro_batch is None:
                return wait()
            with self._progress.aborting():
                self._progress.offloader.gradient_awaited(self._ledger)
                tasks = self._tasks(RECV_BACKWARD, micro_batch, micro_batch.phase)
                return self._window(RECV_BACKWARD, micro_batch, tasks, wait)

        return [WindowedWork(work, window) for work in works]

    def gathered_input(self) -> Tensor | None:
        """The buffer that a gather of the present site's input would fill, if its gather was started already."""
        gathering = self._gathering
        return gathering[0] if gathering is not None else None

    def served(self, output: Tensor) -> Any:
        """The `Work` that gathers into `output`, if a frame has started it. It keeps its ordinal, so that windows keep their
        names."""
        gathering = self._gathering
        if gathering is None or storage_of(gathering[0]) != storage_of(output):
            return None
        if self._progress.scope is not None:
            return gathering[1]
        frame = self._ledger.entered
        if frame is None or frame.policy.section.has_windows:
            self._ledger.ordinal += 1
        return gathering[1] if frame is None or frame.told is None else _telling(frame.told, *gathering)

    @property
    def _gathering(self) -> tuple[Tensor, Any] | None:
        """The gathered input of the half whose backward runs; in a replay only while it is at the site that reads it."""
        scope = self._progress.scope
        if scope is None:
            frame = self._ledger.entered
        elif isinstance(scope, Replayer) and scope.gathered is not None:
            return scope.gathered, DONE
        else:
            frame = scope.frame if isinstance(scope, Replayer) and scope.in_gather_site else None
        return frame.gathering if frame is not None else None

    def _in_forward(self, scope: HalfCall) -> tuple[WindowAddress, MicroBatch | None, BackwardPhase]:
        """Address of the collective that a forward issues now, and for which micro-batch and phase its window runs tasks."""
        address = WindowAddress("fwd", *scope.frame.key, scope.collectives)
        scope.collectives += 1
        served = self._in_forwards or self._progress.trace.enabled
        return address, self._ledger.hidden_by_forward() if served else None, "steady"

    def _in_backward(self) -> tuple[WindowAddress | None, MicroBatch | None, BackwardPhase]:
        """The same for a collective of a half's backward. Outside of one there is no address."""
        entered = self._ledger.entered
        if entered is None:
            return None, None, "steady"
        address = WindowAddress("bwd", *entered.key, self._ledger.ordinal)
        self._ledger.ordinal += 1
        return address, entered.micro_batch, entered.micro_batch.phase

    def _window(self, window: Window, micro_batch: MicroBatch | None, tasks: _Tasks, wait: Callable[[], Any]) -> Any:
        kind: SpanKind = "recv" if window == RECV_BACKWARD else "window"
        with self._progress.trace.span(kind, window=str(window), micro_batch=micro_batch.number if micro_batch else None):
            self._run(tasks.during, window, micro_batch)
            self._run(tasks.filling, window, None)
            waited = wait()
        self._run(tasks.behind, window, micro_batch)
        return waited

    def _run(self, tasks: Sequence[Task], window: Window, micro_batch: MicroBatch | None) -> None:
        """One by one, in the plan's order, until there is no room for what one would regenerate."""
        if not tasks:
            return
        depth = 0 if micro_batch is None else self._windows[micro_batch.chunk].ahead_depth
        opening = Opening(str(window), micro_batch, depth, self._replays, self._progress, self._weight_gradients)
        for task in tasks:
            if not task.run(opening):
                return


def _telling(told: Callable[[Tensor], None], gathered: Tensor, work: Any) -> WindowedWork:
    """Whoever waits for the gather shows what it gathered, before it is used."""

    def wait_and_tell(wait: Callable[[], Any]) -> Any:
        waited = wait()
        told(gathered)
        return waited

    return WindowedWork(work, wait_and_tell)


def _fillers(windows: Sequence[Windows]) -> dict[Window, tuple[Task, ...]]:
    """Which weight gradients run in which collective, of whichever chunk. Those of one chunk come in the plan's order."""
    found: dict[Window, tuple[Task, ...]] = {}
    ends = [*(chunk.first_layer for chunk in windows[1:]), None]
    for chunk in windows:
        of_chunk: dict[Window, tuple[Task, ...]] = {}
        for running, end in zip(windows, ends, strict=True):
            of_chunk |= chunk.weight_gradients_in(running, end)
        for window, tasks in of_chunk.items():
            found[window] = (*found.get(window, ()), *tasks)
    return found
