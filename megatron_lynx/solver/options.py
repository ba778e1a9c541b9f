"""Every choice for one half, priced: what it keeps, what it replays, where, and what that costs.

subsets of items ──replay_of──> what runs, stays, is regenerated ──Seats──> window ──> Option
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_flight import microbatches_in_flight
from megatron_lynx.cost.layer import LayerShape, item_flops
from megatron_lynx.cost.memory import half_memory
from megatron_lynx.cost.replay import replay_of, sensible_choices
from megatron_lynx.items import Half
from megatron_lynx.schedule.windows import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.solver.problem import Option, Seat, StageProblem
from megatron_lynx.solver.seats import Place, Seats, half_of
from megatron_lynx.units import MIB

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import Profile


def stage_problem(job: Job, profile: Profile, stage: int) -> StageProblem:
    """What one stage of a job asks of a solver."""
    budget_mib = job.budget.activation_mib
    return StageProblem(
        stage=stage,
        layers=len(job.layers_of(stage)),
        attention=options(job, profile, stage, "attention"),
        mlp=options(job, profile, stage, "mlp"),
        last_mlp=options(job, profile, stage, "last_mlp"),
        in_flight=microbatches_in_flight(job, stage),
        budget_bytes=None if budget_mib is None else int(budget_mib * MIB),
    )


def options(job: Job, profile: Profile, stage: int, place: Place) -> tuple[Option, ...]:
    """All choices for one kind of half, from keeping everything to replaying everything."""
    seats, tensors = Seats(job, profile, stage), profile.half(half_of(place)).tensors
    return tuple(_option(job, profile, seats, place, replay) for replay in sensible_choices(half_of(place), tensors))


def _option(job: Job, profile: Profile, seats: Seats, place: Place, replay: Collection[str]) -> Option:
    half, costs = half_of(place), profile.half(half_of(place))
    shape = LayerShape(job.model, job.parallel, job.batch.micro)
    replayed = replay_of(half, costs.tensors, replay)
    seat = seats.of(place, replay)
    gathered_bytes = shape.gathered_bytes if seats.gathers(half, replay) else 0
    replay_s = sum(costs.items[item].forward_s for item in replayed.runs)
    flops = item_flops(shape)
    return Option(
        replay=tuple(replay),
        memory=half_memory(half, costs, replayed, gathered_bytes=gathered_bytes, ahead=_ahead(half, seat)),
        seat=seat,
        replay_s=replay_s,
        exposed_s=seat.exposed_s(replay_s, profile.interference),
        flops=sum(flops[item] for item in replayed.runs if item in replay),
    )


def _ahead(half: Half, seat: Seat) -> bool:
    """Whether the half is replayed while the backward of the half before it still runs."""
    return seat.steady not in (ON_DEMAND, RECV_BACKWARD, f"bwd.{half}.0") and not seat.steady.startswith("fwd.")
