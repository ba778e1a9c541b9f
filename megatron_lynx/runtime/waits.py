"""Waits for communication: each is a window, in which runs what the stage's timetable has there (`runtime.windows`).

a collective of a half        fwd.*: serves the micro-batch whose backward comes next     bwd.*: serves its own
the receive of a gradient     pipe.recv_backward: serves the micro-batch that it is for

Behind the replays, weight gradients that are pending run: of whichever micro-batch, and in a forward of whichever chunk. Which
wait of which pass it is, is found here; what runs in it is looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_lynx.anatomy.address import RECV_BACKWARD, Window, WindowAddress
from megatron_lynx.runtime.frame import Frame
from megatron_lynx.runtime.micro_batch import MicroBatch
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.record import Passage, Recorder
from megatron_lynx.runtime.refusals import collective_in_replay
from megatron_lynx.runtime.replay import Replayer
from megatron_lynx.runtime.replays import Replays
from megatron_lynx.runtime.saved import storage_of
from megatron_lynx.runtime.trace import SpanKind
from megatron_lynx.runtime.weight_gradients import WeightGradients
from megatron_lynx.runtime.windows import Opening, WindowedWork
from megatron_lynx.timetable import Pass, Timetable, Wait


class _Done:
    """The `Work` of a gather that was over long ago."""

    def wait(self) -> bool:
        return True


DONE = _Done()


class Waits:
    """All windows of one engine. `timetable` says what runs in which; `ahead_depths`, by chunk, how many halves of a micro-batch
    may be regenerated before backward reaches them (rule R4)."""

    def __init__(
        self,
        progress: Progress,
        timetable: Timetable,
        ahead_depths: Sequence[int],
        replays: Replays,
        weight_gradients: WeightGradients,
    ) -> None:
        self._progress = progress
        self._ledger = progress.ledger
        self._timetable = timetable
        self._ahead_depths = ahead_depths
        self._replays = replays
        self._weight_gradients = weight_gradients

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
        address, micro_batch, planned = self._in_forward(scope) if scope is not None else self._in_backward(frame)
        wait = planned.busy.get(address)
        if wait is None and not self._progress.trace.enabled:
            return None
        return lambda work: WindowedWork(work, lambda proper: self._window(wait or Wait(address), micro_batch, proper))

    def receive(self, works: list[Any]) -> list[Any]:
        """Works of a pipeline exchange that receives a gradient: whichever is waited for first runs the window.

        Whose window it is may be known only then: interleaved schedules ask for gradients ahead of time, and wait for each one
        right before its backward.
        """
        pending = [True]

        def window(proper: Callable[[], Any]) -> Any:
            micro_batch = self._ledger.hidden_by_receive() if pending else None
            pending.clear()
            if micro_batch is None:
                return proper()
            with self._progress.aborting():
                self._progress.offloader.gradient_awaited(self._ledger)
                return self._window(self._timetable.receive(micro_batch.chunk, micro_batch.phase), micro_batch, proper)

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

    def _in_forward(self, scope: Recorder | Passage) -> tuple[WindowAddress, MicroBatch | None, Pass]:
        """Address of the collective that a forward issues now, for which micro-batch its window runs replays, and its pass."""
        address = WindowAddress("fwd", *scope.frame.key, scope.collectives)
        scope.collectives += 1
        served = self._timetable.in_forwards or self._progress.trace.enabled
        micro_batch = self._ledger.hidden_by_forward() if served else None
        serving = None if micro_batch is None else micro_batch.chunk
        return address, micro_batch, self._timetable.forward(scope.frame.policy.chunk, serving)

    def _in_backward(self, entered: Frame) -> tuple[WindowAddress, MicroBatch, Pass]:
        """The same for a collective of a half's backward."""
        address = WindowAddress("bwd", *entered.key, self._ledger.ordinal)
        self._ledger.ordinal += 1
        micro_batch = entered.micro_batch
        return address, micro_batch, self._timetable.backward(micro_batch.chunk, micro_batch.phase)

    def _window(self, wait: Wait, micro_batch: MicroBatch | None, proper: Callable[[], Any]) -> Any:
        """`proper`: the wait itself."""
        kind: SpanKind = "recv" if wait.window == RECV_BACKWARD else "window"
        opening = self._opening(wait.window, micro_batch)
        with self._progress.trace.span(kind, window=str(wait.window), micro_batch=micro_batch.number if micro_batch else None):
            for replay in wait.replays:
                if opening is None or not opening.replay(replay):
                    break
            for linear in wait.weight_gradients:
                self._weight_gradients.run((linear.layer, linear.name), str(wait.window))
            waited = proper()
        if opening is not None:
            for half in wait.gathers:
                opening.gather(half)
        return waited

    def _opening(self, window: Window, micro_batch: MicroBatch | None) -> Opening | None:
        """None where no backward comes behind: then nothing is replayed."""
        if micro_batch is None:
            return None
        return Opening(str(window), micro_batch, self._ahead_depths[micro_batch.chunk], self._replays, self._progress)


def _telling(told: Callable[[Tensor], None], gathered: Tensor, work: Any) -> WindowedWork:
    """Whoever waits for the gather shows what it gathered, before it is used."""

    def wait_and_tell(wait: Callable[[], Any]) -> Any:
        waited = wait()
        told(gathered)
        return waited

    return WindowedWork(work, wait_and_tell)
