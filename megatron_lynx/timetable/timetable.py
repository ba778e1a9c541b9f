"""The timetable of a pipeline stage: a plan and a schedule's passes become events, which everybody reads and nobody works out
again.

    plan ──> PlannedHalf of every layer ──Timetable──>  forward(chunk, serving)   a forward, with the replays that it hides
                                                        receive(chunk, phase)     the receive of a gradient
                                                        backward(chunk, phase)    a backward

    who reads it     the validator         every replay finds its window, in time and within the ahead depth
                     the runtime           what to run in the wait that begins now
                     the simulator         seconds and bytes of each event
                     the filler            what the waits have left

Which task runs in which wait depends on the plan alone (rule R1): on the pass, its phase and, of a forward, on whose backward
comes right behind it. With several chunks that may be another one's: then a window of the forward is known by the place of its
layer in its chunk, and serves the half at the same place in the other one.

    phase        forward                            receive                  backward
    warm-up      hides no replays                   as in steady             what `fwd.*` windows should have done is on demand
    steady       replays of the next backward       its windows' replays     its windows' replays
    cool-down                                       its windows' replays     its windows' replays
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

from megatron_lynx.anatomy import Pass as Passing
from megatron_lynx.anatomy.address import (
    BACKWARD_PHASES,
    ON_DEMAND,
    RECV_BACKWARD,
    BackwardPhase,
    FrameKey,
    Window,
    WindowAddress,
)
from megatron_lynx.schedule.schedule import Phase
from megatron_lynx.timetable.events import HalfPass, Linear, Pass, Replay, Wait
from megatron_lynx.timetable.planned import Layout, PlannedHalf

T = TypeVar("T")


class _Put(NamedTuple):
    """What a plan puts where for backwards of one chunk in one phase."""

    replays: dict[Window, tuple[Replay, ...]]
    gathers: dict[Window, tuple[FrameKey, ...]]
    late: dict[FrameKey, Replay]
    """What is left for on demand."""
    gathered: dict[FrameKey, Window]
    """Halves whose input is gathered ahead of time, and behind which window."""
    first: dict[FrameKey, tuple[Replay, ...]]
    """By half: those that run again whole before it."""
    ahead: dict[FrameKey | Window, tuple[Replay, ...]]
    """What of the layer below begins where backward enters a half, or behind a wait of it."""
    midway: dict[FrameKey, tuple[Replay, ...]]
    """What begins, or goes on, in the midst of a half."""


class Timetable:
    """Of one stage. `chunks`: for each of its chunks the halves in the order of a forward; one of them may have no layers."""

    def __init__(self, chunks: Sequence[Sequence[PlannedHalf]] = ((),), layout: Layout = Layout()) -> None:  # noqa: B008
        self.chunks = tuple(map(tuple, chunks))
        self.layout = layout
        self._forwards: dict[tuple[int, int | None], Pass] = {}
        self._backwards: dict[tuple[int, Phase], Pass] = {}
        self._known: dict[tuple[int, Phase], _Put] = {}

    def forward(self, chunk: int, serving: int | None = None) -> Pass:
        """A forward. `serving`: the chunk whose backward comes right behind it, if its collectives hide replays of that."""
        if (chunk, serving) not in self._forwards:
            shift = 0 if serving is None else self._shift(chunk, serving)
            put = None if serving is None or shift is None else self._put(serving, "steady")
            replays, gathers = (_moved(put.replays, shift or 0), _moved(put.gathers, shift or 0)) if put else ({}, {})
            fillers = self._weight_gradients[chunk]
            self._forwards[chunk, serving] = Pass(
                tuple(
                    HalfPass(half.key, tuple(self._waits("fwd", half, replays, gathers, fillers))) for half in self.chunks[chunk]
                )
            )
        return self._forwards[chunk, serving]

    def backward(self, chunk: int, phase: Phase) -> Pass:
        """A backward."""
        if (chunk, phase) not in self._backwards:
            self._backwards[chunk, phase] = self._backward(chunk, phase)
        return self._backwards[chunk, phase]

    def receive(self, chunk: int, phase: Phase) -> Wait:
        """The receive of the gradient of a backward."""
        replays = self._put(chunk, phase).replays.get(RECV_BACKWARD, ())
        return Wait(RECV_BACKWARD, replays, self._deferred[chunk].get(RECV_BACKWARD, ()))

    def serving(self, chunk: int, phase: BackwardPhase) -> Iterator[tuple[FrameKey | None, Sequence[Wait]]]:
        """Everything in which a backward may be served, in order: in the steady phase a forward, taken to be its own chunk's,
        then the receive of its gradient, and the backward itself, each half that it enters with its waits."""
        if phase == "steady":
            yield from ((None, half.waits) for half in self.forward(chunk, chunk).halves)
        yield None, (self.receive(chunk, phase),)
        yield from ((half.half, half.waits) for half in self.backward(chunk, phase).halves)

    def beside_kept(self, chunk: int) -> Timetable:
        """The same stage with one chunk more at its end: a chunk as micro-batches pass it that keep everything."""
        kept = [PlannedHalf(half.layer, half.section) for half in self.chunks[chunk]]
        return Timetable([*self.chunks, kept], self.layout)

    @property
    def all_halves(self) -> Iterator[PlannedHalf]:
        """Those of all its chunks."""
        return (half for chunk in self.chunks for half in chunk)

    @cached_property
    def in_forwards(self) -> bool:
        """Whether anything runs in a wait of a forward."""
        return any(each.busy for chunk in range(len(self.chunks)) for each in self._forwards_of(chunk))

    @cached_property
    def in_collectives(self) -> bool:
        """Whether anything runs in, or behind, a collective or an exchange."""
        return any(self.busy_halves)

    @cached_property
    def midway_halves(self) -> frozenset[FrameKey]:
        """The halves in whose midst something begins."""
        return frozenset(key for chunk in range(len(self.chunks)) for each in self._backwards_of(chunk) for key in each.midway)

    @cached_property
    def busy_halves(self) -> tuple[frozenset[FrameKey], ...]:
        """By chunk: the halves in one of whose waits anything ever runs, for whichever chunk."""
        return tuple(
            frozenset[FrameKey]().union(*(each.busy_halves for each in (*self._forwards_of(chunk), *self._backwards_of(chunk))))
            for chunk in range(len(self.chunks))
        )

    def _forwards_of(self, chunk: int) -> Iterator[Pass]:
        return (self.forward(chunk, serving) for serving in (None, *range(len(self.chunks))))

    def _backwards_of(self, chunk: int) -> Iterator[Pass]:
        return (self.backward(chunk, phase) for phase in BACKWARD_PHASES)

    def _backward(self, chunk: int, phase: Phase) -> Pass:
        put, fillers = self._put(chunk, phase), self._weight_gradients[chunk]
        return Pass(
            tuple(
                HalfPass(
                    half.key,
                    tuple(self._behind(wait, put) for wait in self._waits("bwd", half, put.replays, put.gathers, fillers)),
                    put.late.get(half.key),
                    put.gathered.get(half.key),
                    put.first.get(half.key, ()),
                    put.ahead.get(half.key, ()),
                    put.midway.get(half.key, ()),
                )
                for half in reversed(self.chunks[chunk])
            )
        )

    def _waits(
        self,
        passing: Passing,
        half: PlannedHalf,
        replays: Mapping[Window, tuple[Replay, ...]],
        gathers: Mapping[Window, tuple[FrameKey, ...]],
        fillers: Mapping[Window, tuple[Linear, ...]],
    ) -> Iterator[Wait]:
        once = passing == "bwd" and self.layout.sequence_parallel and half.gathers and not half.section.exchanges
        for ordinal in range(self.layout.waits(passing, half.layer, half.section)):
            at = WindowAddress(passing, half.layer, half.half, ordinal)
            over = once and half.section.collectives("bwd", True)[ordinal].carries == "input"
            yield Wait(at, replays.get(at, ()), fillers.get(at, ()), gathers.get(at, ()), over)

    def _behind(self, wait: Wait, put: _Put) -> Wait:
        return wait._replace(ahead=put.ahead[wait.window]) if wait.window in put.ahead else wait

    def _put(self, chunk: int, phase: Phase) -> _Put:
        if (chunk, phase) not in self._known:
            self._known[chunk, phase] = _put(self.chunks[chunk], phase, self.layout)
        return self._known[chunk, phase]

    def _shift(self, running: int, other: int) -> int | None:
        """How many layers above a chunk's another one's begin; None where one of them has none."""
        if not self.chunks[running] or not self.chunks[other]:
            return None
        return self.chunks[running][0].layer - self.chunks[other][0].layer

    @cached_property
    def _deferred(self) -> tuple[dict[Window, tuple[Linear, ...]], ...]:
        """By chunk: which of its weight gradients run in which wait, as its plan names them."""
        return tuple(_deferred(halves) for halves in self.chunks)

    @cached_property
    def _weight_gradients(self) -> tuple[dict[Window, tuple[Linear, ...]], ...]:
        """By chunk: which run in the waits of its passes; in a forward those of all chunks do, at the same places."""
        found = []
        for running, own in enumerate(self._deferred):
            waits = dict(own)
            for other, of_other in enumerate(self._deferred):
                shift = self._shift(running, other) if other != running and of_other else None
                for window, linears in _moved(of_other, shift).items() if shift is not None else ():
                    waits[window] = (*waits.get(window, ()), *linears)
            found.append(waits)
        return tuple(found)


def _put(halves: Sequence[PlannedHalf], phase: Phase, layout: Layout) -> _Put:
    put = _Put({}, {}, {}, {}, dict(_whole_before(halves)), {}, {})
    for half in reversed(halves):
        if half.checkpoint and not half.feeds:
            _put_checkpoint(put, half, layout)
        if half.checkpoint or not half.replay:
            continue
        place = half.cooldown if phase == "cooldown" else half.steady
        gather = place.gather
        if gather is not None and (gather == ON_DEMAND or _missed(gather, phase)):
            put.late[half.key] = Replay(half.key, gathered=ON_DEMAND)  # no window may communicate (rule R2)
            continue
        if gather is not None:
            put.gathers[gather] = (*put.gathers.get(gather, ()), half.key)
            put.gathered[half.key] = gather
        since: str | None = None
        for window, until in (*place.stretches, (ON_DEMAND, None)):
            if window == ON_DEMAND:
                put.late[half.key] = Replay(half.key, since, until, gather)
                break
            if _missed(window, phase):
                continue
            put.replays[window] = (*put.replays.get(window, ()), Replay(half.key, since, until, gather))
            since, gather = until, None
            if until is None:
                break
    _begin_ahead(put, halves, layout)
    return put


def _put_checkpoint(put: _Put, half: PlannedHalf, layout: Layout) -> None:
    """Of one that goes on in a wait, what communicates runs again on demand, and the rest of it in that wait."""
    whole, behind = Replay(half.key, communicates=True), half.goes_on_behind
    if behind is None or not layout.waits("bwd", half.layer, half.section):
        put.late[half.key] = whole
        return
    ((window, _),) = half.steady.stretches
    put.late[half.key] = whole._replace(starts=behind)
    put.replays[window] = (*put.replays.get(window, ()), Replay(half.key, started=behind))


def _whole_before(halves: Sequence[PlannedHalf]) -> Iterator[tuple[FrameKey, tuple[Replay, ...]]]:
    """Checkpointed halves that keep no input, each with those before it that run again whole to make it."""
    chain: tuple[Replay, ...] = ()
    for half in halves:
        if half.feeds:
            chain = (*chain, Replay(half.key, whole=True, communicates=True))
        elif chain:
            yield half.key, chain
            chain = ()


def _begin_ahead(put: _Put, halves: Sequence[PlannedHalf], layout: Layout) -> None:
    """Has what layers communicate begin where backward enters the attention half above them, or soon behind that: there nothing
    of stock's is under way, and what the MLP half above held is gone. At the top of a chunk nothing does."""
    for attention, mlp, above in zip(halves[::2], halves[1::2], halves[2::2], strict=False):
        half = mlp if mlp.leaves_under_way else attention
        item = half.leaves_under_way
        if item is None or above.section.kept_whole or not layout.waits("fwd", half.layer, half.section):
            continue
        before, late = put.first.pop(mlp.key, ()), put.late[mlp.key]
        if half is mlp:
            put.ahead[above.key] = (*before, late._replace(starts=item))
            put.late[mlp.key] = late._replace(started=item)
            if late.starts is not None:
                del put.late[mlp.key]  # the rest of it runs in a wait
            continue
        (whole,) = before
        begun, place = whole._replace(starts=item, whole=False), _place_ahead(above, layout)
        put.ahead[place] = (begun,)
        if attention.gathers_ahead:
            gathered = attention.section.gathered
            put.ahead[place] = (begun._replace(starts=gathered),)
            put.midway[above.key] = (begun._replace(started=gathered),)
        put.first[mlp.key] = (whole._replace(started=item),)


def _place_ahead(above: PlannedHalf, layout: Layout) -> FrameKey | Window:
    """Where in a half's backward a reduction of the same ranks begins: with sequence parallelism behind the gather of the
    gradient, which comes first of all and would be queued behind it."""
    first, *_ = above.section.collectives("bwd", layout.sequence_parallel)
    return WindowAddress("bwd", *above.key, 0) if first.carries == "gradient" else above.key


def _missed(window: Window, phase: Phase) -> bool:
    """Whether it lies in a forward that hides nothing."""
    return phase == "warmup" and isinstance(window, WindowAddress) and window.passing == "fwd"


def _deferred(halves: Sequence[PlannedHalf]) -> dict[Window, tuple[Linear, ...]]:
    """Which weight gradients of a chunk run in which wait, in the order in which backward reaches them."""
    found: dict[Window, tuple[Linear, ...]] = {}
    for half in reversed(halves):
        for linear, waits in half.deferred.items():
            for wait in waits:
                found[wait] = (*found.get(wait, ()), Linear(half.layer, half.half, linear))
    return found


def _moved(by_window: Mapping[Window, T], layers: int) -> dict[Window, T]:
    """What lies in forwards, for the forward of another chunk, whose first layer is so many above."""
    return {
        window._replace(layer=window.layer + layers): content
        for window, content in by_window.items()
        if isinstance(window, WindowAddress) and window.passing == "fwd"
    }
