"""Settings that a job leaves open besides its layers, and the ways to decide them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from megatron_lynx.config.job import Head, Job
from megatron_lynx.cost.budget import bounded_by_device
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.partitioning import with_partition
from megatron_lynx.stock.price import least_bytes
from megatron_lynx.stock.setting import NONE, StockSetting

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the optimizer on the host that are tried first. With halves, DeepSeek-V2-Lite on 40 % of an H100 takes 4.0 %
longer."""

STEPS = 100
"""Shares are hundredths, rounded up."""


def as_planned(job: Job, plan: Plan) -> Job:
    """Return the job with everything that it leaves to the plan, and the findings of an earlier run."""
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
    if (experts := job.model.experts) is None or (experts.overlapped, experts.delayed) == (overlapped, delayed):
        return job
    experts = experts.model_copy(update={"overlapped": overlapped, "delayed": delayed})
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})


def with_copies(job: Job, *, kept: bool) -> Job:
    assert job.model.fp8 is not None, "asked only of jobs in FP8"
    fp8 = job.model.fp8.model_copy(update={"copies_kept": kept})
    return job.model_copy(update={"model": job.model.model_copy(update={"fp8": fp8})})


def least_share_that_fits(job: Job, setting: StockSetting = NONE) -> Job:
    """Return a job with the least share of its optimizer on the host that fits under a stock setting, else with all of it."""

    def fits(steps: int) -> bool:
        return least_bytes(with_share(job, steps / STEPS), setting, range(job.parallel.pipeline)) <= job.memory_budget_bytes

    return with_share(job, bisect_left(range(STEPS), True, key=fits) / STEPS)


def with_share(job: Job, share: float) -> Job:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"offload": share})})


class Way(NamedTuple):
    job: Job
    worth: float = 0.0
    """Relative gain from which it is taken instead of an earlier way."""
    may_win: Callable[[Plan | None], bool] = lambda best: True
    """Whether it may be taken, by the plan of the best earlier way, if any fits."""


Setting = Callable[[Job, Sequence[float]], Iterator[Way]]
"""Yields the ways to decide a setting, one if it is not open. The list grows by the cost of each way's plan, infinite if none
fits."""


def _graphs(job: Job, costs: Sequence[float]) -> Iterator[Way]:
    yield Way(job)
    if job.model.captured:
        yield Way(job.with_captured(()))


def _shares(job: Job, costs: Sequence[float]) -> Iterator[Way]:
    """Share of the optimizer on the host: quarters, the least with which everything could be kept, then halfway from the best of
    them to its neighbours. Optimizer bytes cost seconds of the update, once per step; activation bytes cost seconds in each
    micro-batch."""
    if job.optimizer.offload != "auto":
        yield Way(job)
        return
    shares = sorted({*QUARTERS, least_share_that_fits(job).optimizer.offloaded})
    yield from (Way(with_share(job, share)) for share in shares)
    if (best_cost := min(costs)) < inf:
        at = costs.index(best_cost)
        halfway = (round((shares[at] + share) / 2, 2) for share in (*shares[max(0, at - 1) : at], *shares[at + 1 : at + 2]))
        yield from [Way(with_share(job, share)) for share in halfway if share not in shares]


def _heads(job: Job, costs: Sequence[float]) -> Iterator[Way]:
    """The whole head, or the fewest pieces with which the loss is not the last stage's fullest moment."""
    if job.head is None or job.head.pieces != "auto":
        yield Way(job)
        return
    yield Way(job.model_copy(update={"head": None}))
    if (pieced := with_pieces(job)) is not None:
        yield Way(pieced, WORTH_BITS if bounded_by_device(job) else 0.0)


def _rotary(job: Job, costs: Sequence[float]) -> Iterator[Way]:
    """RoPE of packed sequences kept. Its recomputation makes the host wait for the device."""
    yield Way(job)
    if job.rotary_asks_host:
        asking = job.model_copy(update={"batch": job.batch.model_copy(update={"packed": False})})
        yield Way(asking, may_win=lambda best: best is None)


def _copies(job: Job, costs: Sequence[float]) -> Iterator[Way]:
    """In FP8, a checkpointed half recomputes its last linear's input, or keeps its FP8 copy, which holds more."""
    if job.model.fp8 is None or job.model.fp8.copies_kept is not None:
        yield Way(job)
        return
    yield Way(with_copies(job, kept=False))
    yield Way(with_copies(job, kept=True), may_win=lambda best: best is not None and best.checkpointed != "")


SETTINGS: tuple[Setting, ...] = (_graphs, _shares, _heads, _rotary, _copies)


def leaves_nothing(job: Job) -> bool:
    """Whether the job states its layers and every setting."""
    return job.parallel.partition != "auto" and all(len([*setting(job, [inf])]) == 1 for setting in SETTINGS)


def with_least_memory(job: Job) -> Job:
    """Return the job with every setting decided as in the last plan that is tried, which needs the least memory."""
    for setting in SETTINGS:
        *_, job = (way.job for way in setting(job, [inf]) if way.may_win(None))
    return job


LEAST_TOKENS = {"cuda": 1024, "cpu": 1}
"""Tokens of a piece: with fewer, a GEMM has less than half of its rate on A100 and H100 (`matmul.half_size` of clusters)."""

WORTH_BITS = 5e-3
"""Relative gain from which a gradient that is not bitwise stock's is accepted: a choice, nothing was measured."""


def with_pieces(job: Job) -> Job | None:
    """Return the job with the fewest helpful pieces of its head; None if pieces do not help."""
    barred = job.schedule == "double_buffered" or job.model.mtp or job.model.moe_overlapped or "head" in job.unavailable
    if barred or not _loss_binds(job):
        return None
    several = list(_several(job))
    return next((candidate for candidate in several if not _loss_binds(candidate)), several[-1] if several else None)


def _several(job: Job) -> Iterator[Job]:
    """In 2, 4, 8, ... pieces."""
    rows, pieces = job.model.seq // job.parallel.context, 2
    while rows % pieces == 0 and rows // pieces * job.batch.micro >= LEAST_TOKENS[job.cluster.device]:
        yield job.model_copy(update={"head": Head(pieces=pieces)})
        pieces *= 2


def _loss_binds(job: Job) -> bool:
    """Whether the last stage holds more besides its layers at the loss than in backward."""
    parts = parts_beside_layers(job, job.parallel.pipeline - 1)
    return max(parts.at("loss").total, parts.at("head_backward").total) > parts.at("backward").total
