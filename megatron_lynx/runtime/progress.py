"""What an engine is in the middle of and what it has done. The parts of an engine share it, so that none has to know the others.

ledger     passes in flight, and the half whose backward runs
pending    weight gradients that were deferred
scope      the call of a half that runs now: recorded, replayed, or only passed through
counts     what was done since somebody last asked
trace      when it was done, if somebody asked for that
clock      how long replays took, likewise
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_lynx.runtime.counts import Counts
from megatron_lynx.runtime.device import Event
from megatron_lynx.runtime.frame import Frame
from megatron_lynx.runtime.ledger import Ledger
from megatron_lynx.runtime.micro_batch import MicroBatch
from megatron_lynx.runtime.offload import Offloader
from megatron_lynx.runtime.pending import Pending
from megatron_lynx.runtime.record import Passage, Recorder
from megatron_lynx.runtime.replay import Replayer
from megatron_lynx.runtime.replay_clock import ReplayClock
from megatron_lynx.runtime.trace import SpanKind, Trace
from megatron_lynx.runtime.whereabouts import Whereabouts, note


class Progress:
    """The state that the parts of one engine share."""

    def __init__(self, ledger: Ledger, offloader: Offloader, clock: ReplayClock) -> None:
        self.ledger = ledger
        self.trace: Trace = offloader.trace
        self.offloader = offloader
        self.counts = Counts()
        self.clock = clock
        self.pending = Pending()
        self.scope: Recorder | Replayer | Passage | None = None

    @property
    def in_half(self) -> bool:
        """Whether a half runs, or its backward does."""
        return self.scope is not None or self.ledger.entered is not None

    @property
    def busy(self) -> bool:
        """Whether a step is under way (rule R7)."""
        return self.scope is not None or self.ledger.busy or len(self.pending) > 0

    def abandon(self) -> None:
        """Forget the step under way: it failed."""
        self.scope = None
        self.ledger.abort()
        self.pending.clear()
        self.offloader.abandon()

    @contextmanager
    def aborting(self, backward_of: MicroBatch | None = None) -> Iterator[None]:
        """An exception that leaves this context ends the step. `backward_of`: whose backward runs, where one does."""
        try:
            yield
        except BaseException as error:
            note(error, self._whereabouts(backward_of))
            self.abandon()
            raise

    def _whereabouts(self, backward_of: MicroBatch | None = None) -> Whereabouts:
        scope, entered = self.scope, self.ledger.entered
        frame = scope.frame if scope is not None else entered
        micro_batch = frame.micro_batch if frame is not None else backward_of or self.ledger.recording
        return Whereabouts(
            passing="forward" if self.ledger.in_forward else "backward",
            micro_batch=micro_batch.index if micro_batch is not None else None,
            chunk=micro_batch.chunk if micro_batch is not None else 0,
            half=frame.key if frame is not None else None,
            replays=isinstance(scope, Replayer),
            expert_load=self.counts.expert_load,
        )

    def take_counts(self, *, exact: bool) -> Counts:
        counts, self.counts = self.counts, Counts()
        counts.offloaded_bytes, counts.reloaded_bytes = self.offloader.take_bytes()
        counts.host_bytes, counts.exposed_copy_s = self.offloader.host_bytes, self.offloader.take_waited_s(exact=exact)
        return counts

    def run(self, scope: Recorder | Replayer | Passage, *given: Any) -> Any:
        """Run this call. Sites and collectives that are met inside belong to it."""
        outer, self.scope = self.scope, scope
        try:
            return scope.run(*given)
        except BaseException as error:
            note(error, self._whereabouts())
            raise
        finally:
            self.scope = outer

    def add_span(self, kind: SpanKind, frame: Frame, window: str | None, begin: Event | None) -> None:
        """Something was done for a frame since `begin`, which was asked of the trace."""
        if begin is not None:
            self.trace.add(kind, *frame.key, frame.micro_batch.number, window, begin)
