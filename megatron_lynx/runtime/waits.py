"""Waits for communication: each is a window, in which the plan has frames regenerated (`runtime.window`).

a collective of a half        fwd.*: hides the micro-batch whose backward comes next     bwd.*: hides its own
the receive of a gradient     pipe.recv_backward: hides the micro-batch that it is for
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_lynx.anatomy.address import RECV_BACKWARD, BackwardPhase, Window, WindowAddress
from megatron_lynx.runtime.ledger import MicroBatch
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.record import Passage, Recorder
from megatron_lynx.runtime.refusals import collective_in_replay
from megatron_lynx.runtime.replay import Replayer
from megatron_lynx.runtime.replays import Replays
from megatron_lynx.runtime.saved import storage_of
from megatron_lynx.runtime.trace import SpanKind
from megatron_lynx.runtime.window import Agenda, WindowedWork


class Waits:
    """Of one engine. `agendas`, by chunk, say what runs in which window."""

    def __init__(self, progress: Progress, agendas: Sequence[Agenda], replays: Replays) -> None:
        self._progress = progress
        self._ledger = progress.ledger
        self._agendas = agendas
        self._replays = replays

    def collective(self, start: Callable[[], Any]) -> Any:
        """Issue a collective of the tensor-parallel group. Its `Work` runs a window if it was issued inside a half.

        `start` issues it asynchronously. A replay must not communicate (rule R2).
        """
        scope = self._progress.scope
        if isinstance(scope, Replayer):
            raise collective_in_replay(scope.frame.policy.name)
        place, micro_batch, phase = self._in_forward(scope) if scope is not None else self._in_backward()
        work = start()
        if place is None:
            return work
        return WindowedWork(work, lambda wait: self._window(place, micro_batch, phase, wait))

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
                return self._window(RECV_BACKWARD, micro_batch, micro_batch.phase, wait)

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
        if self._progress.scope is None:
            self._ledger.ordinal += 1
        return gathering[1]

    @property
    def _gathering(self) -> tuple[Tensor, Any] | None:
        """Of the half whose backward runs; in a replay only while it is at the site whose input that is."""
        scope = self._progress.scope
        if scope is None:
            frame = self._ledger.entered
        else:
            frame = scope.frame if isinstance(scope, Replayer) and scope.in_gather_site else None
        return frame.gathering if frame is not None else None

    def _in_forward(self, scope: Recorder | Passage) -> tuple[WindowAddress, MicroBatch | None, BackwardPhase]:
        """Where the collective issued now stands, and whose replays it hides."""
        place = WindowAddress("fwd", *scope.frame.key, scope.collectives)
        scope.collectives += 1
        return place, self._ledger.hidden_by_forward(), "steady"

    def _in_backward(self) -> tuple[WindowAddress | None, MicroBatch | None, BackwardPhase]:
        """The same in a half's backward; nowhere outside of one."""
        entered = self._ledger.entered
        if entered is None:
            return None, None, "steady"
        place = WindowAddress("bwd", *entered.key, self._ledger.ordinal)
        self._ledger.ordinal += 1
        return place, entered.micro_batch, entered.micro_batch.phase

    def _window(self, window: Window, micro_batch: MicroBatch | None, phase: BackwardPhase, wait: Callable[[], Any]) -> Any:
        kind: SpanKind = "recv" if window == RECV_BACKWARD else "window"
        number = micro_batch.number if micro_batch else None
        with self._progress.trace.span(kind, window=str(window), micro_batch=number):
            if micro_batch is not None:
                self._replay_ahead(window, micro_batch, phase)
            waited = wait()
        if micro_batch is not None:
            self._gather_behind(window, micro_batch)
        return waited

    def _replay_ahead(self, window: Window, micro_batch: MicroBatch, phase: BackwardPhase) -> None:
        agenda, counts = self._agendas[micro_batch.chunk], self._progress.counts
        for key in agenda.replays_in(self._as_seen_by(micro_batch, window), phase):
            frame = micro_batch.frames.get(key)
            if frame is None or not frame.lets_go:
                continue
            if frame is not self._ledger.entered:
                if len(micro_batch.ahead) >= agenda.ahead_depth:
                    return  # rule R4; what is left is replayed on demand (R5)
                micro_batch.ahead.add(key)
                counts.live_ahead = max(counts.live_ahead, len(micro_batch.ahead))
            self._replays.replay(frame, str(window))
            counts.hidden += 1

    def _gather_behind(self, window: Window, micro_batch: MicroBatch) -> None:
        for key in self._agendas[micro_batch.chunk].gathers_behind(window):
            frame = micro_batch.frames.get(key)
            if frame is not None and frame.lets_go and frame.gathering is None:
                with self._progress.span("gather", frame, str(window)):
                    self._replays.gather(frame)

    def _as_seen_by(self, micro_batch: MicroBatch, window: Window) -> Window:
        """A forward of another chunk is known by where its layer stands in its chunk."""
        if not isinstance(window, WindowAddress) or window.passing == "bwd":
            return window
        running, replayed = self._agendas[self._ledger.recording_chunk], self._agendas[micro_batch.chunk]
        return window._replace(layer=window.layer - running.first_layer + replayed.first_layer)
