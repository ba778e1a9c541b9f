"""Every choice for one half, priced: what it keeps, what it replays, where, and what that costs.

subsets of items ──replay_of──> what runs, stays, is regenerated ──Seats──> windows ──> Option, Option, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_lynx.anatomy import DENSE, EXPERTS
from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_flight import chunks_in_flight
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.cost.replay import sensible_choices
from megatron_lynx.cost.section import priced
from megatron_lynx.solver.answer import LayerChoice, Solved
from megatron_lynx.solver.problem import ON_DEMAND_SEAT, Choices, Mixed, Option, Receive, Seat, StageProblem, is_ahead, is_early
from megatron_lynx.solver.seats import Place, Seats, StageSeats, Wait, half_of
from megatron_lynx.units import MIB

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import Profile

PLACES: tuple[Place, ...] = ("attention", "mlp", "last_mlp")


@dataclass(frozen=True)
class Subset:
    """One set of replayed items of one half, wherever it is replayed."""

    place: Place
    replay: tuple[str, ...]
    backward: tuple[Wait, ...]
    """Windows of its backward that come in time."""
    replay_s: float
    flops: int
    memory: HalfMemory
    """On demand."""

    def option(self, seat: Seat, interference: float) -> Option:
        exposed_s = seat.exposed_s(self.replay_s, interference)
        return Option(self.replay, self._memory(seat.steady), seat, self.replay_s, exposed_s, self.flops)

    def _memory(self, window: str) -> HalfMemory:
        if is_early(window):
            return self._early
        return self._ahead if is_ahead(window, half_of(self.place)) else self.memory

    @cached_property
    def _early(self) -> HalfMemory:
        return replace(self.memory, ahead=0, early=self.memory.regenerated)

    @cached_property
    def _ahead(self) -> HalfMemory:
        return replace(self.memory, ahead=self.memory.regenerated)


@dataclass(frozen=True)
class StageProblems:
    """What the stages of a job ask of a solver. What they share is priced once."""

    job: Job
    profile: Profile

    def of(self, stage: int, layers: int | None = None, chunks: tuple[int, ...] | None = None) -> StageProblem:
        """One stage, with so many layers if the partition is still open. `chunks`: those that are to be alike, if not all."""
        budget_mib, in_flight = self.job.budget.activation_mib, chunks_in_flight(self.job, stage)
        seats = self.seats(stage, chunks)
        layers = len(self.job.layers_of(stage)) if layers is None else layers
        return StageProblem(
            stage,
            layers,
            *self._choices(seats),
            in_flight=in_flight,
            budget_bytes=None if budget_mib is None else int(budget_mib * MIB),
            receive=self._receive(seats, in_flight),
            mixed=self._mixed(seats, layers),
        )

    def _mixed(self, seats: StageSeats, layers: int) -> Mixed | None:
        """Of a stage's chunks that are alike: where the first of them has experts."""
        numbers, profile = self.job.layers_of(seats.stage, seats.chunks[0])[:layers], self.profile.experts
        having = tuple(number in self.job.model.expert_layers for number in numbers)
        if profile is None or not any(having):
            return None
        subsets = self._below_experts
        everywhere = self._seated(subsets, self._seats)
        more = self._priced(subsets, seats) if seats.has_more else ()
        experts = Option((), priced(self.profile, EXPERTS, ()).memory, ON_DEMAND_SEAT, 0.0, 0.0, 0)
        return Mixed(having, Choices((*everywhere, *more)), experts)

    def seats(self, stage: int, chunks: tuple[int, ...] | None = None) -> StageSeats:
        """What some chunks of a stage, or all, are offered in common."""
        return StageSeats(self._seats, stage, tuple(range(self.job.chunks)) if chunks is None else chunks)

    def in_chunk(self, answer: Solved, stage: int, chunk: int) -> Solved:
        """An answer for several chunks of a stage, as it is in one of them."""
        seats = self.seats(stage, (chunk,))
        layers = tuple(
            LayerChoice(self._taken(layer.attention, seats), self._taken(layer.mlp, seats, last_mlp=layer is answer.layers[-1]))
            for layer in answer.layers
        )
        return answer if layers == answer.layers else replace(answer, layers=layers, gap=None)

    def _taken(self, option: Option, seats: StageSeats, *, last_mlp: bool = False) -> Option:
        seat = seats.taken(option.seat, last_mlp=last_mlp)
        if seat == option.seat:
            return option
        return replace(option, seat=seat, exposed_s=seat.exposed_s(option.replay_s, self.profile.interference))

    def _receive(self, seats: StageSeats, in_flight: int) -> Receive | None:
        if seats.received_s is None:
            return None
        done = int(seats.phases.steady > 0)
        return Receive(seats.received_s, self.profile.interference, 1 - seats.phases.steady_share, in_flight - done)

    def _choices(self, seats: StageSeats) -> tuple[Choices, Choices, Choices]:
        """All choices of an attention half, an MLP half and the last MLP half: first those that every stage has."""
        if not seats.has_more:
            return self._everywhere
        attention, mlp, last_mlp = (
            Choices((*common, *self._priced(subsets, seats)))
            for common, subsets in zip(self._everywhere, self._subsets, strict=True)
        )
        return attention, mlp, last_mlp

    def _priced(self, subsets: Iterable[Subset], seats: StageSeats) -> Iterator[Option]:
        offered = ((subset, seat) for subset in subsets for seat in seats.of(subset.place, subset.replay, subset.backward))
        return (subset.option(seat, self.profile.interference) for subset, seat in offered)

    @cached_property
    def _everywhere(self) -> tuple[Choices, Choices, Choices]:
        attention, mlp, last_mlp = (Choices(self._seated(subsets, self._seats)) for subsets in self._subsets)
        return attention, mlp, last_mlp

    def _seated(self, subsets: Iterable[Subset], seats: Seats) -> Iterator[Option]:
        """In the seats that every stage has."""
        offered = (
            (subset, seat) for subset in subsets for seat in seats.everywhere(subset.place, subset.replay, subset.backward)
        )
        return (subset.option(seat, self.profile.interference) for subset, seat in offered)

    @cached_property
    def _seats(self) -> Seats:
        return Seats(self.job, self.profile)

    @cached_property
    def _subsets(self) -> tuple[tuple[Subset, ...], ...]:
        """From keeping everything to replaying everything."""
        return tuple(tuple(self._subsets_of(place)) for place in PLACES)

    @cached_property
    def _below_experts(self) -> tuple[Subset, ...]:
        return tuple(self._subsets_of("expert_attention"))

    def _subsets_of(self, place: Place) -> Iterator[Subset]:
        section = DENSE[half_of(place)]
        for items in sensible_choices(section, self.profile.half(section.half).tensors):
            price = priced(self.profile, section, items)
            backward = tuple(self._seats.backward(place, items))
            yield Subset(place, items, backward, price.replay_s, price.flops, price.memory)
