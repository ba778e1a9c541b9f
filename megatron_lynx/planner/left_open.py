"""Decides settings that a job leaves open besides its layers.

Optimizer share on the host (`optimizer.offload: auto`): optimizer bytes cost seconds of the update, once per step; activation
bytes cost recomputation and copies in each micro-batch. Plans with a few shares are compared:

    quarters, and the least share with which everything could be kept ──> a plan each ──> shortest step with its update
                                                                                       └─> again, halfway to its neighbours

RoPE of packed sequences, whose recomputation makes the host wait for the device: recomputed only if no other plan fits.

FP8 copies of checkpoints (`fp8: {copies_kept: ...}`): a checkpointed half keeps the FP8 copy of its last linear's input, or
recomputes it, which holds less. Both are planned if the latter plan has checkpoints, and the faster one is taken.

Pieces of the head (`head: {pieces: auto}`): the fewest with which the loss is not the last stage's fullest moment. The plan with
them is taken if no other fits, or if its step is shorter by `WORTH_BITS`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TypeVar

from megatron_lynx.config.job import Head, Job
from megatron_lynx.cost.stage_memory import memory_of_stages, parts_beside_layers
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.partitioning import with_partition
from megatron_lynx.profiler.profile import Profile

DecisionT = TypeVar("DecisionT")

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
STEPS = 100
"""Shares are hundredths, rounded up."""


def as_planned(job: Job, plan: Plan) -> Job:
    """Return the job under a plan for it: with everything left to the plan, and what an earlier run learned."""
    if job.parallel.partition == "auto":
        job = with_partition(job, tuple(len(stage.layers) for stage in plan.stages))
    if job.model.fp8 is not None and job.model.fp8.copies_kept is None:
        job = with_copies(job, kept=plan.model.fp8_copies_kept)
    if job.model.captured and not plan.model.captured:
        job = job.with_captured(())
    job = with_exchanges(job, overlapped=plan.model.moe_overlapped, delayed=plan.model.moe_delayed)
    job = job.with_userbuffers(plan.parallel.userbuffers) if job.userbuffers != plan.parallel.userbuffers else job
    if plan.device is not None:
        job = with_share(job, plan.device.optimizer_offload)
    learned = job.learned if plan.provenance.learned is None else plan.provenance.learned
    return job.model_copy(update={"head": None if plan.head is None else Head(pieces=plan.head.pieces), "learned": learned})


def with_exchanges(job: Job, *, overlapped: bool, delayed: bool) -> Job:
    """Return the job with exchanges of experts overlapped, and their weight gradients delayed, or not."""
    if (experts := job.model.experts) is None or (experts.overlapped, experts.delayed) == (overlapped, delayed):
        return job
    experts = experts.model_copy(update={"overlapped": overlapped, "delayed": delayed})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})


def with_rotary_again(job: Job) -> Iterator[Job]:
    """Yield the job, then, if it keeps RoPE, the one that may recompute it and let the host wait."""
    yield job
    if job.rotary_asks_host:
        yield job.model_copy(update={"batch": job.batch.model_copy(update={"packed": False})})


def with_copies(job: Job, *, kept: bool) -> Job:
    """Return a job in FP8 whose checkpoints keep copies, or do not."""
    assert job.model.fp8 is not None, "asked only of jobs in FP8"
    fp8 = job.model.fp8.model_copy(update={"copies_kept": kept})
    return job.model_copy(update={"model": job.model.model_copy(update={"fp8": fp8})})


ENDLESS_GIB = 1e6
"""More than any device's memory."""


def endless(job: Job) -> Iterator[Job]:
    """Yield the job with endless memory, which needs nothing on the host and no head in pieces; without its graphs, too."""
    budget = job.budget.model_copy(update={"memory_gib": ENDLESS_GIB, "activation_mib": None})
    job = job.model_copy(update={"budget": budget, "offload_ratio": 0.0, "head": None})
    job = with_share(job, 0.0) if job.optimizer.offload == "auto" else job
    if job.model.fp8 is not None and job.model.fp8.copies_kept is None:
        job = with_copies(job, kept=False)
    yield job
    if job.model.captured:
        yield job.with_captured(())


def best_share(job: Job, decide: Callable[[Job], DecisionT], step_s: Callable[[DecisionT], float]) -> DecisionT:
    """Return the decision for the share with the shortest step, including its update. Raises `Infeasible` if none fits, with the
    excess when everything is on the host."""
    decisions: dict[float, DecisionT] = {}
    failed: dict[float, Infeasible] = {}

    def tried(share: float) -> None:
        try:
            decisions[share] = decide(with_share(job, share))
        except Infeasible as error:
            failed[share] = error

    def best() -> float:
        return min(sorted(decisions), key=lambda share: step_s(decisions[share]))

    for share in sorted({*QUARTERS, _least_that_keeps_all(job)}):
        tried(share)
    if not decisions:
        raise failed[1.0]
    for share in _between(best(), sorted({*decisions, *failed})):
        tried(share)
    return decisions[best()]


def least_share_that_fits(job: Job) -> Job:
    """Return a job under a stock policy with the least share of its optimizer on the host that fits, else with all of it."""

    def fits(steps: int) -> bool:
        return all(memory.total <= job.memory_budget_bytes for memory in memory_of_stages(with_share(job, steps / STEPS), ratio))

    ratio = 1.0 if job.offload_ratio == "auto" else job.offload_ratio
    return with_share(job, bisect_left(range(STEPS), True, key=fits) / STEPS)


def last_tried(job: Job) -> Job:
    """Return the job with every open choice as in the last plan that is tried."""
    job = job.with_captured(())
    job = with_share(job, 1.0) if job.optimizer.offload == "auto" else job
    return (with_pieces(job) or with_whole_head(job)) if job.head is not None and job.head.pieces == "auto" else job


def with_share(job: Job, share: float) -> Job:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"offload": share})})


def _least_that_keeps_all(job: Job) -> float:
    """The least share with which stock fits without recomputation; 1 if there is none."""

    return least_share_that_fits(job.model_copy(update={"policy": "none", "offload_ratio": 0.0})).optimizer.offloaded


def _between(best: float, tried: list[float]) -> list[float]:
    """Halfway to the nearest shares that were tried."""
    at = tried.index(best)
    near = [*tried[max(0, at - 1) : at], *tried[at + 1 : at + 2]]
    return [round((best + other) / 2, 2) for other in near if round((best + other) / 2, 2) not in tried]


LEAST_TOKENS = {"cuda": 1024, "cpu": 1}
"""Tokens of a piece: smaller GEMMs do not fill a GPU."""

WORTH_BITS = 5e-3
"""Relative gain from which a gradient that is not bitwise stock's is accepted."""


def with_pieces(job: Job) -> Job | None:
    """Return the job with the fewest helpful pieces of its head; None if pieces do not help."""
    barred = job.schedule == "double_buffered" or job.model.mtp or job.model.moe_overlapped or "head" in job.unavailable
    if barred or not _loss_binds(job):
        return None
    several = list(_several(job))
    return next((candidate for candidate in several if not _loss_binds(candidate)), several[-1] if several else None)


def with_whole_head(job: Job) -> Job:
    return job.model_copy(update={"head": None})


def inexact_change(job: Job, profile: Profile, plannable: Callable[[Job, Profile], bool]) -> Iterator[Problem]:
    """Yield a problem if an infeasible job would fit with its head in pieces. `plannable` is called last."""
    pieced = with_pieces(job) if job.head is None else None
    if pieced is not None and plannable(pieced, profile):
        todo = "plan with --inexact head: the gradient of one weight is then another sum (docs/plan_file.md)"
        yield Problem("inexact change that fits", f"head.pieces: {pieced.head_pieces}", "", todo)


def _several(job: Job) -> Iterator[Job]:
    """Yield the job with its head in 2, 4, 8, ... pieces."""
    rows, pieces = job.model.seq // job.parallel.context, 2
    while rows % pieces == 0 and rows // pieces * job.batch.micro >= LEAST_TOKENS[job.cluster.device]:
        yield job.model_copy(update={"head": Head(pieces=pieces)})
        pieces *= 2


def _loss_binds(job: Job) -> bool:
    """Whether the last stage holds more besides its layers at the loss than in backward."""
    parts = parts_beside_layers(job, job.parallel.pipeline - 1)
    return max(parts.at("loss").total, parts.at("head_backward").total) > parts.at("backward").total
