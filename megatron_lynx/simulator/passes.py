"""Seconds of a stage's passes, their waits and recomputations, and their changes of memory.

Times of a pass start at 0; the simulator places it. A pass is at least as long as its host time:

    device    ├F─┤├F─┤├──B──┤         host    ├─F─┤├─F─┤├───────B───────┤         result          ├─F─┤├─F─┤├───────B───────┤

Delayed weight gradients (docs/runtime.md): a wait takes one entry of each planned linear, after recomputations. Over its chunk's
bound the chunk's oldest run at once, exposed; those left run in its last backward: at its end, or once its gradient is sent (W);
or, if gradients are reduced meanwhile, each before its linear's own.

Copies of offloaded activations between a device and its host: two streams, one per direction, overlapped with passes.

    compute      F k ├──────┤ F k+1 ├─────┤ ...  ├──── B n ────┤├──── B n+1 ────┤
    to the host             └── k ──┘            │
    back                                         └── n+1 ──┘

A blocking exchange ends in a device synchronisation (Megatron's `batch_p2p_sync`), which waits for all copies issued before it.
Copies that avoid messages start with the pass after the exchange, and the exchange waits until both streams are free.

A micro-batch whose backward follows its forward at once is offloaded only within its own passes (`simulator.walk`; Yuan et al.,
ATC '24). Copies do not slow messages down and do not share a link with another device; a caller may pass longer copies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_lynx.cost.section import WeightGradient
from megatron_lynx.schedule.schedule import Action, ActionKind, Phase, VirtualMicroBatch
from megatron_lynx.timeline import Span
from megatron_lynx.timetable import Linear


@dataclass(frozen=True)
class HostCopy:
    out_s: float
    back_s: float
    bytes: int
    avoids_messages: bool = False


class Copied(NamedTuple):
    """`action`: the forward that the copy follows, or the backward that needs it."""

    action: Action
    start_s: float
    end_s: float
    bytes: int

    @property
    def memory(self) -> tuple[float, int]:
        """(time, change in device bytes): freed when an offload ends, allocated when a reload starts."""
        return (self.end_s, -self.bytes) if self.action.kind == "F" else (self.start_s, self.bytes)


class Stream:
    """One direction between a device and its host: a copy begins once the one before it is complete."""

    def __init__(self) -> None:
        self.free_s = 0.0

    def copy(self, at_s: float, seconds: float) -> tuple[float, float]:
        """Return the start of a copy, `at_s` at the earliest, and its end."""
        start_s = max(at_s, self.free_s)
        self.free_s = start_s + seconds
        return start_s, self.free_s


class HostCopies:
    """Copies of one stage, in the order in which its passes issue them. `part`: a part of a pass, such as one layer."""

    def __init__(self) -> None:
        self.done: list[Copied] = []
        self._out, self._back = Stream(), Stream()
        self._out_end_s: dict[tuple[VirtualMicroBatch, int], float] = {}
        self._back_end_s: dict[tuple[VirtualMicroBatch, int], float] = {}

    @property
    def free_s(self) -> float:
        return max(self._out.free_s, self._back.free_s)

    def offload(self, forward: Action, time_s: float, seconds: float, size_bytes: int, part: int = 0) -> None:
        start_s, end_s = self._out.copy(time_s, seconds)
        self._out_end_s[forward.virtual, part] = end_s
        self.done.append(Copied(forward, start_s, end_s, size_bytes))

    def reload(self, backward: Action, time_s: float, seconds: float, size_bytes: int, part: int = 0) -> None:
        """Issue the copy back for a backward, at `time_s` at the earliest. Does nothing if there is no copy or it was already
        issued."""
        out_end_s = self._out_end_s.pop((backward.virtual, part), None)
        if out_end_s is not None:
            start_s, end_s = self._back.copy(max(time_s, out_end_s), seconds)
            self._back_end_s[backward.virtual, part] = end_s
            self.done.append(Copied(backward, start_s, end_s, size_bytes))

    def back_s(self, backward: Action, part: int = 0) -> float:
        """Time at which the backward's copy is complete; 0 if nothing was offloaded. A later time than the pass's start is
        exposed."""
        return self._back_end_s.pop((backward.virtual, part), 0.0)


class Entry(NamedTuple):
    """A delayed weight gradient, or a piece of one."""

    of: Linear
    chunk: int
    cost: WeightGradient


Pending = tuple[Entry, ...]
"""Of a stage, oldest first."""


PASS_KINDS: tuple[ActionKind, ActionKind] = ("F", "B")
PHASES: tuple[Phase, Phase, Phase] = ("warmup", "steady", "cooldown")


@dataclass(frozen=True)
class TimedPass:
    """One pass of a micro-batch through a chunk, including its tensor-parallel waits."""

    seconds: float = 0.0
    hidden_s: float = 0.0
    """Seconds of recomputation inside windows, without interference. Work during a message is all hidden until it is placed."""
    exposed_s: float = 0.0
    """Seconds of recomputation (and of its gathers) that lengthen the pass."""
    memory: tuple[tuple[float, int], ...] = ()
    """(seconds from the beginning, bytes allocated or, below 0, freed)."""
    spans: tuple[Span, ...] = ()
    """From the beginning; without micro-batch."""
    regenerated: tuple[tuple[float, int], ...] = ()
    """As `memory`, recomputed tensors only."""
    host_s: float = 0.0
    """0 if unknown."""
    host_late_s: float = 0.0
    """Seconds added because it is host-bound."""
    filled_s: float = 0.0
    """Seconds of delayed weight gradients inside windows, without interference."""
    unfilled_s: float = 0.0
    """Seconds of delayed weight gradients that are exposed."""
    copy_wait_s: float = 0.0
    """Waits for copies half by half (`simulator.walk`)."""

    def issued_in(self, host_s: float) -> TimedPass:
        """Return the pass stretched to its host time, if that is longer. Copies are complete meanwhile."""
        if host_s <= self.seconds:
            return self if host_s == self.host_s else replace(self, host_s=host_s)
        slower = host_s / self.seconds if self.seconds else 1.0
        return replace(
            self,
            seconds=host_s,
            memory=tuple((slower * at_s, change) for at_s, change in self.memory),
            regenerated=tuple((slower * at_s, change) for at_s, change in self.regenerated),
            spans=tuple(
                span._replace(start_s=slower * span.start_s, end_s=slower * span.end_s)
                for span in self.spans
                if span.kind != "copy_wait"
            ),
            host_s=host_s,
            host_late_s=host_s - (self.seconds - self.copy_wait_s),
            copy_wait_s=0.0,
        )


NOTHING = TimedPass()

PassKey = tuple[ActionKind, Phase, bool]
"""(kind, phase, whether it is the chunk's last in a step)."""

Walked = Callable[[PassKey, Pending], tuple[TimedPass, Pending]]
"""Returns a pass of a chunk, and the weight gradients that are pending after it."""


def in_phases(passes: Mapping[tuple[ActionKind, Phase], TimedPass]) -> Walked:
    """Passes that delay no weight gradient; without work if not listed."""
    return lambda key, pending: (passes.get(key[:2], NOTHING), pending)


def walked_once(walked: Walked, plain: Callable[[PassKey], PassKey | None]) -> Walked:
    """Passes that are walked when they are first needed.

    `plain` maps keys of equal passes to one, and those of passes without work to None. Passes are known by the identity of the
    pending entries, which are interned and kept alive: comparing long equal tuples is slow.
    """
    known: dict[tuple[PassKey, int], tuple[Pending, tuple[TimedPass, Pending]]] = {}
    interned: dict[Pending, Pending] = {}

    def walked_before(key: PassKey, pending: Pending) -> tuple[TimedPass, Pending]:
        found = known.get((key, id(pending)))
        if found is None:
            if (alike := plain(key)) is None:
                found = pending, (NOTHING, pending)
            elif (found := known.get((alike, id(pending)))) is None:
                made, left = walked(alike, pending)
                found = known[alike, id(pending)] = pending, (made, interned.setdefault(left, left))
            known[key, id(pending)] = found
        return found[1]

    return walked_before


@dataclass(frozen=True)
class ChunkPasses:
    walked: Walked
    copy: HostCopy | None = None
    """Offloaded bytes of each micro-batch. Recomputation during a receive does not wait for it."""
    whole: Container[int] = ()
    keeping: ChunkPasses | None = None
    """Passes of micro-batches that keep everything."""
    at_once: ChunkPasses | None = None
    """Passes of micro-batches whose own backward follows at once, if they are offloaded within these passes."""

    def of(self, micro_batch: int, *, at_once: bool = False) -> ChunkPasses:
        passes = self.keeping if self.keeping is not None and micro_batch in self.whole else self
        return passes.at_once if at_once and passes.at_once is not None else passes

    def one(self, kind: ActionKind, phase: Phase) -> TimedPass:
        """The pass of a phase with no weight gradient pending. R: work that runs while the gradient is awaited."""
        return self.walked((kind, phase, False), ())[0]

    def with_steady(self, forward: TimedPass, backward: TimedPass) -> ChunkPasses:
        passes = {(kind, phase): self.one(kind, phase) for kind in PASS_KINDS for phase in PHASES}
        return replace(self, walked=in_phases(passes | {("F", "steady"): forward, ("B", "steady"): backward}))
