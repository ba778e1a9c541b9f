"""What recomputation buys: bytes of one layer against seconds, for every set of replayed items worth looking at.

seconds │                    o full               The front begins with nothing replayed. Balanced recomputation (norms and
        │             o                           the activation; Yuan et al., ATC '24) ends the flat stretch, before a GEMM
        │   balanced                              or the attention has to run again.
        │ o──o
        └─────────────────────── bytes saved
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from megatron_lynx.anatomy import DENSE, HALVES, Half
from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import gather_once_s
from megatron_lynx.cost.layer import LayerShape
from megatron_lynx.cost.replay import replay_of, sensible_choices
from megatron_lynx.profiler.profile import Profile


@dataclass(frozen=True)
class TradeOff:
    """A set of items that are replayed on demand: one layer, one micro-batch, one rank."""

    replay: tuple[str, ...]
    saved_bytes: int
    """How much less is held between forward and backward than if everything is kept."""
    replay_s: float


def pareto_front(job: Job, profile: Profile) -> tuple[TradeOff, ...]:
    """Every trade-off that no other one beats in both, from nothing replayed to most bytes saved."""
    both = [
        TradeOff(first.replay + second.replay, first.saved_bytes + second.saved_bytes, first.replay_s + second.replay_s)
        for first, second in product(*(list(_trade_offs(job, profile, half)) for half in HALVES))
    ]
    front: list[TradeOff] = []
    for one in sorted(both, key=lambda one: (one.replay_s, -one.saved_bytes, len(one.replay))):
        if not front or one.saved_bytes > front[-1].saved_bytes:
            front.append(one)
    return tuple(front)


def _trade_offs(job: Job, profile: Profile, half: Half) -> Iterator[TradeOff]:
    costs, shape = profile.half(half), LayerShape(job.model, job.parallel, job.batch.micro)
    for replay in sensible_choices(half, costs.tensors):
        replayed = replay_of(half, costs.tensors, replay)
        gathers = job.parallel.sequence_parallel and DENSE[half].column_parallel in replay
        gather_s = gather_once_s(profile, half, None, shape.gathered_bytes) if gathers else 0.0
        saved_bytes = costs.saved_bytes - costs.input_bytes - replayed.stays_bytes
        yield TradeOff(replay, saved_bytes, sum(costs.items[item].forward_s for item in replayed.runs) + gather_s)
