"""What an engine is in the middle of and what it has done. The parts of an engine share it, so that none has to know the others.

ledger     passes in flight, and the half whose backward runs
pending    weight gradients that were deferred
scope      the call of a half that runs now
counts     what was done since somebody last asked
trace      when it was done, if somebody asked for that
clock      how long replays took, likewise

When something fails in a step, the innermost call notes on the error where the engine was, because the engine forgets a failed
step; who explains the error asks for it (`whereabouts_of`). Nothing of this costs a step that does not fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, Literal, Protocol

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.device import Event
from megatron_lynx.runtime.frame import Frame, MicroBatch
from megatron_lynx.runtime.ledger import Ledger
from megatron_lynx.runtime.offload import Offloader
from megatron_lynx.runtime.pending import Pending
from megatron_lynx.runtime.site import Site, SiteCall
from megatron_lynx.runtime.trace import ReplayClock, SpanKind, Trace


@dataclass
class Counts:
    """What an engine did since its counts were last taken."""

    recorded: int = 0
    """Frames that let something go."""
    let_go_bytes: int = 0
    """Bytes of tensors that were let go. Those that share memory count each."""
    hidden: int = 0
    """Replays that ran inside a window."""
    on_demand: int = 0
    """Replays that backward waited for."""
    ahead: int = 0
    """Of these, how many began ahead, and left under way what they communicate."""
    gathered: int = 0
    """Inputs gathered once."""
    fell_back: int = 0
    """Halves of experts that were checkpoints because more rows came than the plan holds for."""
    live_ahead: int = 0
    """The most frames of one micro-batch that were regenerated before backward reached them."""
    deferred: int = 0
    """Weight gradients that their backward left for later."""
    filled: int = 0
    """Deferred weight gradients that ran in a wait."""
    flushed: int = 0
    """Deferred weight gradients that nothing hid: they ran because they had to be done, or because others did not fit."""
    deferred_bytes: int = 0
    """The most that operands of deferred weight gradients held at once."""
    offloaded_bytes: int = 0
    """Copied to the host."""
    reloaded_bytes: int = 0
    """Copied back."""
    host_bytes: int = 0
    """Host memory held for offloaded activations."""
    exposed_copy_s: float = 0.0
    """Seconds for which compute waited for copies, either way."""
    expert_load: float = 0.0
    """The most rows that experts of one layer got of one micro-batch, over what they would get if all were asked as often. 0:
    there are no experts."""

    @property
    def replayed(self) -> int:
        return self.hidden + self.on_demand

    def __add__(self, later: Counts) -> Counts:
        """The counts of both stretches: sums, and the larger of what is held at once."""
        most = ("live_ahead", "deferred_bytes", "host_bytes", "expert_load")
        both = {one.name: (getattr(self, one.name), getattr(later, one.name)) for one in fields(Counts)}
        return Counts(**{name: max(values) if name in most else sum(values) for name, values in both.items()})


_NAME = "_megatron_lynx_whereabouts"


@dataclass(frozen=True)
class Whereabouts:
    """A moment of one rank's step, as its engine saw it."""

    passing: Literal["forward", "backward"]
    micro_batch: int | None = None
    """Counted from 0 in the step. None: it was not recorded."""
    chunk: int = 0
    half: FrameKey | None = None
    """The half that ran, or that backward had reached; of a replay, the half that was made again."""
    replays: bool = False
    expert_load: float = 0.0
    """The largest load of this step so far, as `Counts` has it."""


def note(error: BaseException, where: Whereabouts) -> None:
    """Remember where an error came up, unless somebody further in has."""
    if whereabouts_of(error) is None:
        setattr(error, _NAME, where)


def whereabouts_of(error: BaseException) -> Whereabouts | None:
    """Where it came up; None for errors that did not come out of a pass."""
    found = getattr(error, _NAME, None)
    return found if isinstance(found, Whereabouts) else None


class HalfCall(Protocol):
    """One call of a half that runs now: recorded, replayed, or one in which nothing is let go."""

    frame: Frame
    replays: bool
    collectives: int
    """How many it has issued that are windows."""

    def run(self, *given: Any) -> Any:
        """Run the half's code."""

    def passes(self, site: Site) -> bool:
        """Whether a site is called as without a plan."""

    def site(self, call: SiteCall) -> Any:
        """The half's code calls a site, which is not passed."""


class Progress:
    """The state that the parts of one engine share."""

    def __init__(self, ledger: Ledger, offloader: Offloader, clock: ReplayClock) -> None:
        self.ledger = ledger
        self.trace: Trace = offloader.trace
        self.offloader = offloader
        self.counts = Counts()
        self.clock = clock
        self.pending = Pending()
        self.scope: HalfCall | None = None

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
            replays=scope is not None and scope.replays,
            expert_load=self.counts.expert_load,
        )

    def take_counts(self, *, exact: bool) -> Counts:
        counts, self.counts = self.counts, Counts()
        counts.offloaded_bytes, counts.reloaded_bytes = self.offloader.take_bytes()
        counts.host_bytes, counts.exposed_copy_s = self.offloader.host_bytes, self.offloader.take_waited_s(exact=exact)
        return counts

    def run(self, scope: HalfCall, *given: Any) -> Any:
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
