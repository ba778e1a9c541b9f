"""Every choice for one half, priced: what it keeps, what it replays, where, and what that costs.

subsets of items ──replay_of──> what runs, stays, is regenerated ──Seats──> windows ──> Option, Option, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_flight import microbatches_in_flight
from megatron_lynx.cost.layer import LayerShape, item_flops
from megatron_lynx.cost.memory import half_memory
from megatron_lynx.cost.replay import Replay, replay_of, sensible_choices
from megatron_lynx.solver.problem import Choices, Option, Seat, StageProblem, is_ahead, is_early
from megatron_lynx.solver.seats import Place, Seats, StageSeats, half_of
from megatron_lynx.units import MIB

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import Profile

PLACES: tuple[Place, ...] = ("attention", "mlp", "last_mlp")


def stage_problem(job: Job, profile: Profile, stage: int) -> StageProblem:
    """What one stage of a job asks of a solver. For several stages `StageProblems` does not price everything again."""
    return StageProblems(job, profile).of(stage)


@dataclass(frozen=True)
class Subset:
    """One set of replayed items of one half, wherever it is replayed."""

    place: Place
    replay: tuple[str, ...]
    replayed: Replay
    replay_s: float
    flops: int
    gathered_bytes: int


@dataclass(frozen=True)
class StageProblems:
    """What the stages of a job ask of a solver. What they share is priced once."""

    job: Job
    profile: Profile

    def of(self, stage: int, layers: int | None = None) -> StageProblem:
        """One stage, with so many layers if the partition is still open."""
        budget_mib = self.job.budget.activation_mib
        return StageProblem(
            stage,
            len(self.job.layers_of(stage)) if layers is None else layers,
            *self.choices(stage),
            in_flight=microbatches_in_flight(self.job, stage),
            budget_bytes=None if budget_mib is None else int(budget_mib * MIB),
        )

    def choices(self, stage: int) -> tuple[Choices, Choices, Choices]:
        """All choices of an attention half, an MLP half and the last MLP half: first those that every stage has."""
        last = stage == self.job.parallel.pipeline - 1
        shared = self._everywhere
        if last:
            return shared
        seats = StageSeats(self._seats, stage)
        attention, mlp, last_mlp = (
            Choices((*common, *self._priced(subsets, seats))) for common, subsets in zip(shared, self._subsets, strict=True)
        )
        return attention, mlp, last_mlp

    def _priced(self, subsets: Iterable[Subset], seats: StageSeats) -> Iterator[Option]:
        return (self._option(subset, seat) for subset in subsets for seat in seats.of(subset.place, subset.replay))

    @cached_property
    def _everywhere(self) -> tuple[Choices, Choices, Choices]:
        attention, mlp, last_mlp = (
            Choices(
                self._option(subset, seat) for subset in subsets for seat in self._seats.everywhere(subset.place, subset.replay)
            )
            for subsets in self._subsets
        )
        return attention, mlp, last_mlp

    @cached_property
    def _seats(self) -> Seats:
        return Seats(self.job, self.profile)

    @cached_property
    def _subsets(self) -> tuple[tuple[Subset, ...], ...]:
        """From keeping everything to replaying everything."""
        return tuple(tuple(self._subsets_of(place)) for place in PLACES)

    def _subsets_of(self, place: Place) -> Iterator[Subset]:
        half, costs = half_of(place), self.profile.half(half_of(place))
        shape = LayerShape(self.job.model, self.job.parallel, self.job.batch.micro)
        flops = item_flops(shape)
        for replay in sensible_choices(half, costs.tensors):
            replayed = replay_of(half, costs.tensors, replay)
            yield Subset(
                place,
                replay,
                replayed,
                replay_s=sum(costs.items[item].forward_s for item in replayed.runs),
                flops=sum(flops[item] for item in replayed.runs if item in replay),
                gathered_bytes=shape.gathered_bytes if self._seats.gathers(half, replay) else 0,
            )

    def _option(self, subset: Subset, seat: Seat) -> Option:
        half = half_of(subset.place)
        memory = half_memory(
            half,
            self.profile.half(half),
            subset.replayed,
            gathered_bytes=subset.gathered_bytes,
            ahead=is_ahead(seat.steady, half),
            early=is_early(seat.steady),
        )
        exposed_s = seat.exposed_s(subset.replay_s, self.profile.interference)
        return Option(subset.replay, memory, seat, subset.replay_s, exposed_s, subset.flops)
