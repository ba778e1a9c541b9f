"""Windows of a stage's backward in which a half may be recomputed.

    backward, from the last layer      mlp(L) [bwd.mlp.*]       attention(L) [bwd.attention.*]    mlp(L-1) ...
                                       recompute attention(L)   recompute mlp(L-1)                                            [1]
    with sequence parallelism          [bwd.X.0] X ...          a half's own recomputation, before its GEMMs                  [2]

[1] A half is recomputed in the windows of the half before it, in several parts if there are several windows. Bytes recomputed
    before the last of these windows are held while that whole half runs.
[2] `anatomy.in_time` says when that window comes before anything of the half is needed. Each window is offered to one half: to
    the half itself in Megatron's own layers, and to the next half in Transformer Engine's, where it rarely comes in time for the
    half itself.
[3] With expert parallelism the all-to-all that brings gradients to the experts is offered to their own half, which needs its
    recomputed tensors right after it. The all-to-all that returns gradients is offered to the attention half below.

An input that is gathered once for recomputation is gathered after the first collective of the half before. If the recomputation
runs in that half's first window, it is gathered after the first collective one half earlier.

These are not offered: windows of zero length; windows in which an input is gathered; windows of forwards; collectives with
userbuffers or beside overlapped exchanges of experts. Recomputation that communicates runs on demand: in FP8 with one scale for
all ranks' parts of a norm's output, recomputing the norm reduces its amax (rule R2). So does recomputation in a
receive of a gradient: that hides less than 1 % of a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import inf
from typing import NamedTuple

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import (
    ON_DEMAND,
    Stretch,
    amax_reducing,
    half_before,
    in_words,
    own_waits_in_time,
    window_name,
)
from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import gather_lost_and_spared_s, window_lengths_s, windows_of
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.section import PricedSection, Progress
from megatron_lynx.once import once
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape


class Wait(NamedTuple):
    """A window, as one half sees it."""

    window: str
    seconds: float
    ahead: int = 0
    """Moments before the half's own backward at which it begins (`held_in`); 0 for the half's own windows."""


class Portion(NamedTuple):
    """Part of a window, and the part of a recomputation that runs there."""

    wait: Wait
    runs_s: float = inf
    """Seconds of recomputation that run there: up to `until`, or all that is left."""
    until: str | None = None
    """Item before which it stops."""


class Placement(tuple[Portion, ...]):
    """Portions of windows in which a half is recomputed, in order. Without portions it is recomputed on demand: when backward
    asks for its first tensor."""

    __slots__ = ()

    def hidden_s(self, recompute_s: float, interference: float) -> float:
        """Return the seconds of recomputation that the windows hide. In a window it takes `interference` times as long."""
        left_s, hidden_s = recompute_s, 0.0
        for portion in self:
            runs_s = min(left_s, portion.runs_s)
            left_s, hidden_s = left_s - runs_s, hidden_s + min(runs_s, portion.wait.seconds / interference)
        return hidden_s

    @property
    def window(self) -> str:
        """As written in a plan file."""
        rest = () if not self or self[-1].until is None else (Stretch(ON_DEMAND),)
        return in_words((*(Stretch(portion.wait.window, portion.until) for portion in self), *rest))


NOWHERE = Placement()


@dataclass(frozen=True)
class Seat:
    placement: Placement = NOWHERE
    gather: str | None = None
    """Collective after which the input is gathered, if it is (sequence parallelism)."""
    gather_s: float = 0.0
    """Exposed seconds of that gather."""
    spared_s: float = 0.0
    """Seconds by which the half's backward waits less for its input, because it was gathered before."""
    gather_ahead: int = 0
    """Moments before the half's own backward from which the gathered input is there (`held_in`)."""

    def exposed_s(self, recompute_s: float, interference: float) -> float:
        return max(0.0, recompute_s - self.placement.hidden_s(recompute_s, interference)) + self.gather_s


ON_DEMAND_SEAT = Seat()


def held_in(price: PricedSection, section: Section, seat: Seat) -> HalfMemory:
    """Return the memory of a half in this seat.

    windows of       attention(3)        mlp(2): the half before    attention(2): the half itself
                     [A]       [B]       [A]       [B]              [A]
    recomputed       ahead[3]  ahead[2]  ahead[1]  ahead[0]         whole ... until the half's own backward ends
    """
    memory = price.memory
    steps = [(seat.gather_ahead, price.stops[section.column_parallel].bytes)] if seat.gather_ahead else []
    for portion in seat.placement:
        steps.append((portion.wait.ahead, memory.regenerated if portion.until is None else price.stops[portion.until].bytes))
    bytes_ahead = [0] * len(memory.ahead)
    for ahead, size in steps:
        bytes_ahead[:ahead] = [size] * ahead
    first, second, third, fourth = bytes_ahead
    return replace(memory, ahead=(first, second, third, fourth))


@dataclass(frozen=True)
class HalfKind:
    """The section of a half, and that of the half whose backward comes before: together they determine its windows."""

    section: Section
    before: Section | None
    """The stage's last half has None: its backward comes first."""

    @property
    def half(self) -> Half:
        return self.section.half

    @property
    def last(self) -> bool:
        return self.before is None

    @property
    def windows_before(self) -> bool:
        """Whether the half before has windows. One of experts has none."""
        return self.before is not None and self.before.has_windows


@dataclass(frozen=True)
class Seats:
    job: Job
    profile: Profile

    def everywhere(self, kind: HalfKind, recompute: Collection[str], price: PricedSection) -> list[Seat]:
        """Return the seats of a half on every stage, on demand first, then those that hide most."""
        if not recompute:
            return [ON_DEMAND_SEAT]
        sliced = self.job.parallel.sequence_parallel
        gathers = sliced and kind.section.gathered in recompute  # a GEMM whose input is gathered once
        communicates = amax_reducing(kind.section, recompute, self.job.model.fp8_recipe, sequence_parallel=sliced)
        if gathers and (communicates or not self._collectives_hide or not kind.windows_before):
            return [Seat(NOWHERE, ON_DEMAND, *self._gather_s(kind.half, None))]
        if communicates:
            return [ON_DEMAND_SEAT]
        placements = _placements(self._waits(kind, recompute), self.stops(kind, recompute, price), price.recompute_s)
        hidden_s = partial(Placement.hidden_s, recompute_s=price.recompute_s, interference=self.profile.interference)
        best_first = [NOWHERE, *sorted(placements, key=hidden_s, reverse=True)]
        return [self._gathered_for(kind, placement) if gathers else Seat(placement) for placement in best_first]

    def stops(self, kind: HalfKind, recompute: Collection[str], price: PricedSection) -> dict[str, Progress]:
        """Return the items before which recomputation may stop.

        Items before a gather run together with it. A norm of Transformer Engine would run again with its linear.
        """
        column = kind.section.gathered
        before_linear = column in recompute and not self.job.model.uses_te and not self.job.parallel.sequence_parallel
        return {
            name: stop
            for name, stop in price.stops.items()
            if 0 < stop.seconds < price.recompute_s and (name != column or before_linear)
        }

    def _waits(self, kind: HalfKind, recompute: Collection[str]) -> list[Wait]:
        """Return the windows that are offered to this half, in order. [1] [2] [3]"""
        sequence_parallel, te, halves = self.job.parallel.sequence_parallel, self.job.model.uses_te, self.job.model.halves
        half, above = half_before(kind.half)
        before = self._windows(halves[half], above, ahead=2) if kind.windows_before else []
        if kind.before is not None and kind.before.exchanges:
            before = self._windows(kind.before, ahead=2)[1:]
        own_waits = self._windows(kind.section) if kind.section.exchanges else []
        if sequence_parallel and not (te and self._reaches_back):
            before, own_waits = before[-1:], own_waits if kind.section.exchanges else self._windows(halves[kind.half])
        in_time = own_waits_in_time(kind.section, recompute, exchanged=True, sequence_parallel=sequence_parallel, te=te)
        return [wait for wait in before + own_waits[:in_time] if wait.seconds > 0]

    def _gathered_for(self, kind: HalfKind, placement: Placement) -> Seat:
        before, above = half_before(kind.half)
        first = window_name("bwd", before, 0, above)
        if not placement or placement[0].wait.window != first:
            return Seat(placement, first, *self._gather_s(kind.half, before), gather_ahead=2)
        return Seat(placement, window_name("bwd", kind.half, 0, 1), *self._gather_s(kind.half, kind.half, True), gather_ahead=4)

    def at_top(self, kind: HalfKind, seat: Seat) -> bool:
        """Whether a seat exists in the stage's last layer, where only one half runs backward before the attention half."""
        return seat.gather != window_name("bwd", kind.half, 0, 1)

    @property
    def _collectives_hide(self) -> bool:
        """Whether tensor-parallel collectives are windows (`Job.no_windows`). Beside overlapped exchanges of experts nodes
        of two micro-batches alternate."""
        return not self.job.no_windows and not self.job.model.moe_overlapped

    @cached_property
    def _reaches_back(self) -> bool:
        """Whether an input may be gathered two halves before: if neither may be experts or opaque."""
        return self.job.model.experts is None and not (self.job.model.opaque or self.job.model.captured)

    @once
    def _windows(self, section: Section, above: int = 0, *, ahead: int = 0) -> list[Wait]:
        """Windows of a half in a backward, some layers above the recomputed half. A gather of an input is no window. `ahead`:
        moments before the recomputed half's backward at which that backward begins."""
        whole = self.job.model.experts_whole or self.job.userbuffers
        hide = not whole if section.exchanges else self._collectives_hide and section.has_windows
        lengths_s = window_lengths_s(self.profile, "bwd", section, self.shape.gathered_bytes) if hide else ()
        last = len(lengths_s) - 1
        return [
            Wait(window_name("bwd", section.half, ordinal, above), seconds, ahead and ahead - (ordinal == last))
            for ordinal, (seconds, waited) in enumerate(zip(lengths_s, windows_of(self.profile, section, "bwd"), strict=False))
            if waited.carries != "input"
        ]

    @once
    def _gather_s(self, half: Half, behind: Half | None, whole: bool = False) -> tuple[float, float]:
        """Return exposed seconds and saved seconds of gathering a half's input after another half's first collective."""
        halves = self.job.model.halves
        section = None if behind is None else halves[behind]
        return gather_lost_and_spared_s(self.profile, halves[half], section, self.shape.gathered_bytes, whole=whole)

    @cached_property
    def shape(self) -> LayerShape:
        return LayerShape.of(self.job)


def _placements(
    waits: Sequence[Wait], stops: Mapping[str, Progress], recompute_s: float, done_s: float = 0.0
) -> Iterator[Placement]:
    """Yield every way to run the rest of a recomputation in these windows, in order: in one window, or part by part. The rest
    after the last part runs on demand."""
    for number, wait in enumerate(waits):
        yield Placement((Portion(wait, recompute_s - done_s),))
        for name, stop in stops.items():
            if stop.seconds > done_s:
                begun = Portion(wait, stop.seconds - done_s, name)
                yield Placement((begun,))
                for rest in _placements(waits[number + 1 :], stops, recompute_s, stop.seconds):
                    yield Placement((begun, *rest))
