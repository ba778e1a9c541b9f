"""State that the parts of one engine share, and one call of a half's code, to which sites and collectives report (`Run`).

If a step fails, the innermost call notes on the error where the engine was (`whereabouts_of`): the engine forgets failed steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.figures import Figures
from megatron_lynx.runtime.device import Clock, Device, Event, Trace
from megatron_lynx.runtime.frame import Frame, MicroBatch
from megatron_lynx.runtime.offload import Offloader
from megatron_lynx.runtime.order import Ledger
from megatron_lynx.runtime.site import Site, SiteCall
from megatron_lynx.timeline import SpanKind

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


class Run:
    """A call that keeps everything; base of recorder and recomputer."""

    recomputes = False
    owns_gathered = False
    """Whether the site's gathered input is kept, and so needs a buffer that is not shared."""
    gathering: tuple[Any, Any] | None = None
    """(gathered input of the present site, the `Work` that fills it), if it was started before."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.collectives = 0
        """Windows among the collectives issued so far."""
        self._segment = 0
        self._ordinal = 0
        self._item: str | None = None

    def run(self, *given: Any) -> Any:
        args, kwargs = given
        return self.frame.code(*args, **kwargs)

    def passes(self, site: Site) -> bool:
        return True

    def site(self, call: SiteCall) -> Any:
        return call()

    def window(self, *, exchange: bool) -> Callable[[Any], Any] | None:
        """Return what wraps the `Work` of a collective that a recomputation issues; None leaves the `Work` as it is."""
        return None

    def keep_gathered(self, whole: Any) -> None:
        """Report the gathered input of the present site: a tensor, or TE's quantized storage of one."""

    def experts_got(self, rows: int, balanced: int) -> None:
        """Report the rows that experts are called with. `balanced`: rows under uniform routing."""

    def _enter(self, item: str | None = None) -> None:
        self._segment += 1
        self._ordinal = 0
        self._item = item


class Done:
    """The `Work` of a collective that was waited for before, or that is left in flight for another waiter."""

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        return True


DONE = Done()


class Progress:
    def __init__(self, ledger: Ledger, offloader: Offloader, device: Device) -> None:
        self.ledger = ledger
        self.offloader = offloader
        self.trace: Trace = offloader.trace
        self.clock = Clock(device)
        self.counts = Figures()
        self.scope: Run | None = None

    @property
    def in_half(self) -> bool:
        return self.scope is not None or self.ledger.entered is not None

    def whereabouts(self, backward_of: MicroBatch | None = None) -> Whereabouts:
        scope, entered = self.scope, self.ledger.entered
        frame = scope.frame if scope is not None else entered
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
