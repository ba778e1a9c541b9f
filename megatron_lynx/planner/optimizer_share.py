"""How much of the optimizer goes to the host, where a job leaves that open (`optimizer.offload: auto`).

Bytes of the optimizer and bytes of activations are bought at different prices: of the one in seconds of an update, once in a
step, of the other in seconds of replays and copies, of every micro-batch. A plan for each of a few shares knows both:

    quarters, and the least share with which all could be kept ──> a plan each ──> shortest step with its update
                                                                                       └─> once more, halfway to its neighbours
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TypeVar

from megatron_lynx.config.job import Job
from megatron_lynx.cost.stage_memory import memory_of_stages
from megatron_lynx.errors import Infeasible

DecisionT = TypeVar("DecisionT")

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
STEPS = 100
"""A share is given in hundredths, rounded up."""


def best_share(job: Job, decide: Callable[[Job], DecisionT], step_s: Callable[[DecisionT], float]) -> DecisionT:
    """The decision for the share with the shortest step, its update included. Raises `Infeasible` where none fits, with what is
    missing when all of it is on the host."""
    found: dict[float, DecisionT] = {}
    failed: dict[float, Infeasible] = {}

    def tried(share: float) -> None:
        try:
            found[share] = decide(with_share(job, share))
        except Infeasible as error:
            failed[share] = error

    def best() -> float:
        return min(sorted(found), key=lambda share: step_s(found[share]))

    for share in sorted({*QUARTERS, _least_that_keeps_all(job)}):
        tried(share)
    if not found:
        raise failed[1.0]
    for share in _between(best(), sorted({*found, *failed})):
        tried(share)
    return found[best()]


def least_share_that_fits(job: Job) -> Job:
    """The job, under a policy of stock's, with as little of its optimizer on the host as it fits with; else with all of it."""

    def fits(steps: int) -> bool:
        return all(memory.total <= job.memory_budget_bytes for memory in memory_of_stages(with_share(job, steps / STEPS), ratio))

    ratio = 1.0 if job.offload_ratio == "auto" else job.offload_ratio
    return with_share(job, bisect_left(range(STEPS), True, key=fits) / STEPS)


def with_share(job: Job, share: float) -> Job:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"offload": share})})


def _least_that_keeps_all(job: Job) -> float:
    """The least share with which stock fits without recomputation; 1 where there is none."""

    return least_share_that_fits(job.model_copy(update={"policy": "none", "offload_ratio": 0.0})).optimizer.offloaded


def _between(best: float, tried: list[float]) -> list[float]:
    """Halfway to the next shares that were tried."""
    at = tried.index(best)
    near = [*tried[max(0, at - 1) : at], *tried[at + 1 : at + 2]]
    return [round((best + other) / 2, 2) for other in near if round((best + other) / 2, 2) not in tried]
