"""The windows of its own stage's backward in which a half may be replayed, how long they are, and what runs in which.

    backward, from the last layer      mlp(L) [bwd.mlp.*]       attention(L) [bwd.attention.*]    mlp(L-1) ...
                                       replay attention(L)      replay mlp(L-1)                                               [1]
    with sequence parallelism          [bwd.X.0] X ...          a half's own replay, before its GEMMs                         [2]

[1] The windows of the half before, stretch by stretch if there are several. What is regenerated before its last one exists while
    all of that half does.
[2] `anatomy.in_time` says when that window comes before anything of the half is needed. Each window is offered to one half, so
    this one to the half itself in Megatron's own layers, and to the half behind it in Transformer Engine's, where it is seldom in
    time.
[3] Where experts are shared out over ranks, the all-to-all that brings gradients to them is offered to their own half, which
    needs what it makes again right behind it, and the one that takes gradients back to the attention half below.
An input that is gathered once for its replay is gathered behind the first collective of the half before, or of the half before
that, where the replay is to run in the first window of the half before. A window without length is not offered, nor is one in
which an input is gathered, which a half that gathers its input once does not have. A replay that communicates runs on demand: in
FP8 with one scale for all ranks' parts of a norm's output, that of a norm reduces its amax (rule R2). With userbuffers no
collective is a window, nor beside overlapped exchanges of experts. The receive of the gradient is a window, too:
`solver.stage_seats`. Windows of forwards are not offered: over 200 rows of `benchmarks.mechanisms` they made steps 0.003 %
shorter in the mean and 0.27 % at most, as what they regenerate is held until its backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from megatron_lynx.anatomy import HALVES, Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, window_name
from megatron_lynx.anatomy.in_time import amax_reducing, half_before, own_exchanges_in_time, own_windows_in_time
from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import gather_lost_and_spared_s, window_lengths_s
from megatron_lynx.cost.section import PricedSection, Stop
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.solver.placement import NOWHERE, ON_DEMAND_SEAT, Placement, Portion, Seat

Wait = tuple[str, float]
"""A window and its seconds."""


@dataclass(frozen=True)
class HalfKind:
    """What decides which windows a half has: what fills it, and what fills the half whose backward comes before its own."""

    section: Section
    before: Section | None
    """None for the stage's last half, whose backward comes first."""

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
    """The seats that all stages of a job have in common."""

    job: Job
    profile: Profile

    def everywhere(
        self, kind: HalfKind, replay: Collection[str], backward: Sequence[Placement], price: PricedSection
    ) -> tuple[Seat, ...]:
        """Those that every stage has, beginning with the one on demand. `backward`: what `backward()` says of this half."""
        if not replay:
            return (ON_DEMAND_SEAT,)
        communicates, gathers = self.communicates(kind, replay), self.gathers(kind, replay)
        if gathers and (communicates or not self._collectives_hide or not kind.windows_before):
            return (Seat(NOWHERE, NOWHERE, 1.0, ON_DEMAND, *self._gather_s(kind.half, None)),)
        if communicates:
            return (Seat(stays=True),)
        placements = [NOWHERE, *backward]
        if not gathers:
            return tuple(Seat(placement, placement) for placement in placements)
        return tuple(Seat(placement, placement, 1.0, *self._gathered_for(kind, placement)) for placement in placements)

    def gathers(self, kind: HalfKind, replay: Collection[str]) -> bool:
        """Whether the replay calls a GEMM whose input is gathered once."""
        return self.job.parallel.sequence_parallel and kind.section.gathered in replay

    def communicates(self, kind: HalfKind, replay: Collection[str]) -> bool:
        """Whether the replay casts something anew whose amax is reduced."""
        sliced = self.job.parallel.sequence_parallel
        return bool(amax_reducing(kind.section, replay, self.job.model.fp8_recipe, sequence_parallel=sliced))

    def backward(self, kind: HalfKind, replay: Collection[str], price: PricedSection) -> list[Placement]:
        """Placements in windows of the stage's backward that come before anything of the half is needed, the best first."""
        waits = self._waits(kind, replay)
        found = _placements(waits, self.stops(kind, replay, price), price.replay_s)
        interference = self.profile.interference
        return sorted(found, key=lambda placement: -placement.hidden_s(price.replay_s, interference))

    def stops(self, kind: HalfKind, replay: Collection[str], price: PricedSection) -> dict[str, Stop]:
        """Where the replay is worth stopping. What runs before a gather runs with it; and a norm of Transformer Engine's would
        run again with its linear."""
        column = kind.section.gathered
        before_linear = column in replay and not self.job.model.uses_te and not self.job.parallel.sequence_parallel
        return {
            name: stop
            for name, stop in price.stops.items()
            if 0 < stop.seconds < price.replay_s and (name != column or before_linear)
        }

    def _waits(self, kind: HalfKind, replay: Collection[str]) -> list[Wait]:
        """The windows that are offered to this half, in the order in which they come. [1] [2] [3]"""
        sequence_parallel, te = self.job.parallel.sequence_parallel, self.job.model.uses_te
        before = self._windows[half_before(kind.half)] if kind.windows_before else []
        if kind.before is not None and kind.before.exchanges:
            before = self._exchanges[1:]
        own: list[Wait] = []
        if kind.section.exchanges:
            own = self._exchanges[: own_exchanges_in_time(kind.section, replay)]
        if sequence_parallel and not (te and self._reaches_back):
            in_time = own_windows_in_time(kind.section, replay, sequence_parallel=True, te=te) if kind.section.has_windows else 0
            before, own = before[-1:], own + self._windows[kind.half, 0][:in_time]
        return [wait for wait in before + own if wait[1] > 0]

    def _gathered_for(self, kind: HalfKind, placement: Placement) -> tuple[str, float, float]:
        """Behind which collective the input is gathered for a replay there, for how long that delays it, and what it spares."""
        before, above = half_before(kind.half)
        first = window_name("bwd", before, 0, above)
        if not placement or placement[0].window != first:
            return first, *self._gather_s(kind.half, before)
        return window_name("bwd", kind.half, 0, 1), *self._gather_s(kind.half, kind.half, whole=True)

    def at_top(self, kind: HalfKind, seat: Seat) -> bool:
        """Whether the stage has all its windows for the attention half of its last layer, before which one half runs backward."""
        return seat.gather != window_name("bwd", kind.half, 0, 1)

    @property
    def _collectives_hide(self) -> bool:
        """Whether collectives of the tensor-parallel group are windows: not where userbuffers exchange inside GEMMs, nor beside
        overlapped exchanges of experts, where a layer's nodes run in turn with those of another micro-batch."""
        return not self.job.userbuffers and not self.job.model.moe_overlapped

    @cached_property
    def _reaches_back(self) -> bool:
        """Whether a half's input may be gathered two halves before: not where one of those may be a mixture of experts, or what
        nobody looks into."""
        return self.job.model.experts is None and not (self.job.model.opaque or self.job.model.captured)

    @cached_property
    def _exchanges(self) -> list[Wait]:
        """The all-to-alls of experts in a backward: the first brings gradients to them, the others take theirs back."""
        experts = self.job.model.experts
        if experts is None or self.job.model.experts_whole or self.job.userbuffers:
            return []
        section = self.job.model.kind_sections(experts=True)[1]
        lengths_s = window_lengths_s(self.profile, "bwd", section, self.shape.gathered_bytes)
        return [(window_name("bwd", section.half, at), seconds) for at, seconds in enumerate(lengths_s)]

    @cached_property
    def _windows(self) -> dict[tuple[Half, int], list[Wait]]:
        """All windows of a half in a backward, by how many layers it is above the half that is replayed. Where an input is
        gathered there is none for sure."""
        return {
            (half, above): [
                (window_name("bwd", half, ordinal, above), seconds)
                for ordinal, (seconds, collective) in enumerate(
                    zip(
                        window_lengths_s(self.profile, "bwd", self._halves[half], self.shape.gathered_bytes),
                        self._halves[half].collectives("bwd", self.job.parallel.sequence_parallel),
                        strict=False,
                    )
                )
                if collective.carries != "input" and self._collectives_hide and self._halves[half].has_windows
            ]
            for half, above in product(HALVES, (0, 1))
        }

    def _gather_s(self, half: Half, behind: Half | None, *, whole: bool = False) -> tuple[float, float]:
        """Exposed seconds of gathering a half's input behind another half's first collective, and seconds that it spares."""
        key = half, behind, whole
        if key not in self._gathers_s:
            section = None if behind is None else self._halves[behind]
            where = self.profile, self._halves[half], section, self.shape.gathered_bytes
            self._gathers_s[key] = gather_lost_and_spared_s(*where, whole=whole)
        return self._gathers_s[key]

    @cached_property
    def _gathers_s(self) -> dict[tuple[Half, Half | None, bool], tuple[float, float]]:
        return {}

    @cached_property
    def _halves(self) -> Mapping[Half, Section]:
        return self.job.model.halves

    @cached_property
    def p2p_s(self) -> float:
        """Seconds of one message between stages."""
        return self.profile.link_s("p2p", self.shape.input_bytes)

    @cached_property
    def shape(self) -> LayerShape:
        return LayerShape.of(self.job)


def _placements(waits: Sequence[Wait], stops: Mapping[str, Stop], replay_s: float, done_s: float = 0.0) -> Iterator[Placement]:
    """Every way to run what is left of a replay in these windows, in order: all of it in one, or stretch by stretch. What comes
    behind the last stretch runs on demand."""
    for number, (window, seconds) in enumerate(waits):
        yield Placement((Portion(window, seconds, replay_s - done_s),))
        for name, stop in stops.items():
            if stop.seconds > done_s:
                begun = Portion(window, seconds, stop.seconds - done_s, name)
                yield Placement((begun,))
                for rest in _placements(waits[number + 1 :], stops, replay_s, stop.seconds):
                    yield Placement((begun, *rest))
