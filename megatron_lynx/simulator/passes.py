"""How long a stage's passes take, what waits and replays they hold, and what they add to memory and give back.

    phase        forward                           R: while the gradient is awaited     backward
    warm-up      hides nothing                     as in steady                         all of `fwd.*` windows on demand
    steady       replays of the next backward      its windows' replays                 its windows' replays
    cool-down                                      its windows' replays                 its windows' replays

The next backward may be another chunk's, and a forward hides nothing where that is its own, or of a micro-batch that is whole.
A pass is timed from its own beginning; the simulator puts it in its place. No pass is shorter than its host time:

    device    ├F─┤├F─┤├──B──┤         host    ├─F─┤├─F─┤├───────B───────┤         what is run     ├─F─┤├─F─┤├───────B───────┤

Weight gradients that a stage has deferred: which are pending, which run where, and which no longer fit.

    backward reaches a linear ──put──> [ oldest ... newest ] ──due──> its oldest runs in a wait, as the plan says
                                          │ more bytes than its chunk's bound
                                          └──> the chunk's oldest run at once, exposed; all that are left, in its last backward:
                                               behind it, or, where gradients are reduced meanwhile, each before its linear's own

As in the runtime, a wait takes one of each linear that the plan has put there, behind the replays: a forward's of any chunk's
linears, the receive of a gradient of the linears of the chunk whose gradient it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from megatron_lynx.cost.weight_gradient import WeightGradient
from megatron_lynx.schedule.schedule import Phase
from megatron_lynx.simulator.copies import HostCopy
from megatron_lynx.timeline import Span
from megatron_lynx.timetable import Linear


class Entry(NamedTuple):
    """One weight gradient of one micro-batch that was deferred."""

    of: Linear
    chunk: int
    cost: WeightGradient


Pending = tuple[Entry, ...]
"""Entries, the oldest first."""


class Queue:
    """What is pending on a stage while a pass of one chunk runs. `bound_bytes`: what entries of that chunk may hold."""

    def __init__(self, chunk: int, bound_bytes: int, pending: Pending = ()) -> None:
        self.chunk = chunk
        self._bound_bytes = bound_bytes
        self._entries = list(pending)

    @property
    def pending(self) -> Pending:
        return tuple(self._entries)

    def put(self, entry: Entry) -> Iterator[Entry]:
        """Queues an entry; yields those that have to run for that, the oldest first."""
        left_bytes = self._bound_bytes - entry.cost.bytes
        own = [each for each in self._entries if each.chunk == self.chunk]
        held_bytes = sum(each.cost.bytes for each in own)
        self._entries.append(entry)
        for oldest in (*own, entry):
            if held_bytes <= left_bytes:
                return
            self._entries.remove(oldest)
            held_bytes -= oldest.cost.bytes
            yield oldest

    def due(self, linears: Sequence[Linear]) -> Iterator[Entry]:
        """Takes what runs in a wait: of each of these linears the oldest entry, if there is one."""
        for linear in linears:
            found = next((entry for entry in self._entries if entry.of == linear), None)
            if found is not None:
                self._entries.remove(found)
                yield found

    def take(self, of: Linear) -> Iterator[Entry]:
        """Takes everything that is left of one linear."""
        own = [entry for entry in self._entries if entry.of == of]
        self._entries = [entry for entry in self._entries if entry.of != of]
        yield from own

    def flush(self) -> Iterator[Entry]:
        """Takes everything that is left of the chunk."""
        own = [entry for entry in self._entries if entry.chunk == self.chunk]
        self._entries = [entry for entry in self._entries if entry.chunk != self.chunk]
        yield from own


PHASES: tuple[Phase, Phase, Phase] = ("warmup", "steady", "cooldown")


@dataclass(frozen=True)
class TimedPass:
    """One pass of one micro-batch through one chunk, its waits for tensor-parallel communication included."""

    seconds: float = 0.0
    hidden_s: float = 0.0
    """Seconds of replay inside windows, as they would take alone."""
    exposed_s: float = 0.0
    """Seconds of replay (and of gathers for them) that make the pass longer."""
    memory: tuple[tuple[float, int], ...] = ()
    """(seconds from the beginning, bytes that are taken or, below 0, given back)."""
    spans: tuple[Span, ...] = ()
    """What a picture shows, from the beginning; without micro-batch."""
    regenerated: tuple[tuple[float, int], ...] = ()
    """As `memory`, of what replays have made alone."""
    host_s: float = 0.0
    """What the host needs to issue it; 0 where that is not known."""
    host_late_s: float = 0.0
    """By how much it is longer than on the device alone, because the host is slower."""
    filled_s: float = 0.0
    """Seconds of deferred weight gradients inside windows, as they would take alone."""
    unfilled_s: float = 0.0
    """Seconds of deferred weight gradients that no window hides."""
    copy_wait_s: float = 0.0
    """Seconds of it in which it waits for copies of its own halves (`simulator.half_copies`)."""

    def issued_in(self, host_s: float) -> TimedPass:
        """The same pass, as long as the host needs for it at least. Then its kernels wait for Python, each for its part; copies
        are over meanwhile."""
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

PassKey = tuple[Literal["F", "R", "B"], Phase | int, bool]
"""A kind of pass: its phase, or for a forward the chunk whose replays it hides; and whether it is the chunk's last in a step."""


@dataclass(frozen=True)
class Filled:
    """The passes of a chunk of a stage that defers weight gradients: what they run besides depends on what is pending."""

    walks: Callable[[PassKey, Queue], TimedPass]
    """Makes a pass, and leaves what is then pending in the queue."""
    queue: Callable[[Pending], Queue]
    plain: Callable[[PassKey], PassKey]
    """Of the keys of passes that are alike always the same one."""
    others: Collection[int] = ()
    """The other chunks of the stage."""
    known: dict[tuple[PassKey, int], tuple[Pending, TimedPass, Pending]] = field(default_factory=dict)
    """What is worked out once, by the identity of what was pending, which is kept: in the steady phase the same is pending again
    and again, and to compare it takes long."""
    left: dict[Pending, Pending] = field(default_factory=dict)
    """What passes left pending, each once: so equal ones are identical."""

    def of(self, key: PassKey, pending: Pending) -> tuple[TimedPass, Pending]:
        """A pass, and what is pending after it."""
        known = self.known.get((key, id(pending)))
        if known is None:
            plain = self.plain(key)
            known = self.known.get((plain, id(pending))) or self._walked(plain, pending)
            self.known[plain, id(pending)] = self.known[key, id(pending)] = known
        return known[1:]

    def _walked(self, key: PassKey, pending: Pending) -> tuple[Pending, TimedPass, Pending]:
        queue = self.queue(pending)
        made = self.walks(key, queue)
        return pending, made, self.left.setdefault(queue.pending, queue.pending)

    def forward_key(self, phase: Phase, chunk: int | None) -> PassKey:
        """The forward whose collectives hide replays of a backward of `chunk` (None: no replays)."""
        if chunk is None or phase != "steady":
            return "F", "warmup", False
        return "F", chunk if chunk in self.others else "steady", False


Which = TypeVar("Which", Phase, int)


@dataclass(frozen=True, eq=False)
class Walked(Mapping[Which, TimedPass]):
    """Passes of one kind, by phase or by chunk, of a chunk that defers nothing: each is made when it is asked for."""

    filled: Filled
    kind: Literal["F", "R", "B"]
    all: Collection[Which]
    made: dict[Which, TimedPass] = field(default_factory=dict)

    def __getitem__(self, which: Which) -> TimedPass:
        if which not in self.made:
            if which not in self.all:
                raise KeyError(which)
            self.made[which] = self.filled.of((self.kind, which, False), ())[0]
        return self.made[which]

    def __iter__(self) -> Iterator[Which]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)


@dataclass(frozen=True)
class ChunkPasses:
    """All passes of one chunk, and its copies. `received`: the replays that run while its gradient is awaited."""

    forward: Mapping[Phase, TimedPass] = field(default_factory=dict)
    backward: Mapping[Phase, TimedPass] = field(default_factory=dict)
    received: Mapping[Phase, TimedPass] = field(default_factory=lambda: dict.fromkeys(PHASES, NOTHING))
    copy: HostCopy | None = None
    """What is offloaded of each micro-batch. Replays of a receive are taken not to need it."""
    hiding: Mapping[int, TimedPass] = field(default_factory=dict)
    """Forwards that hide the replays of another chunk, by that chunk."""
    whole: Container[int] = ()
    """Micro-batches that keep everything."""
    keeping: ChunkPasses | None = None
    """The passes of micro-batches that keep everything."""
    at_once: ChunkPasses | None = None
    """The passes of micro-batches whose own backward follows at once, where these are offloaded within."""
    filled: Filled | None = None
    """In place of `forward`, `backward`, `received` and `hiding`, where the stage defers weight gradients."""

    def of(self, micro_batch: int) -> ChunkPasses:
        """The passes of one micro-batch."""
        return self.keeping if self.keeping is not None and micro_batch in self.whole else self

    def forward_before(self, phase: Phase, chunk: int | None) -> TimedPass:
        """A forward whose collectives hide replays of a backward of `chunk` (None: no replays)."""
        if chunk is None or phase != "steady":
            return self.forward["warmup"]
        return self.hiding.get(chunk, self.forward["steady"])


def plain_passes(forward_s: float, backward_s: float, *, resident_bytes: int = 0) -> ChunkPasses:
    """A chunk that replays nothing, from its two durations; its memory is taken at the end of forward."""
    forward = TimedPass(forward_s, memory=((forward_s, resident_bytes),), spans=(Span("forward", 0.0, forward_s),))
    backward = TimedPass(backward_s, memory=((backward_s, -resident_bytes),), spans=(Span("backward", 0.0, backward_s),))
    return ChunkPasses(dict.fromkeys(PHASES, forward), dict.fromkeys(PHASES, backward))
