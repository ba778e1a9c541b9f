"""Settings that a job leaves open besides its layers, and the ways to decide them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from math import inf

from megatron_lynx.config.job import Head, Job
from megatron_lynx.cost.budget import bounded_by_device
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.partitioning import with_partition
from megatron_lynx.stock.price import least_bytes
from megatron_lynx.stock.setting import NONE, StockSetting

EIGHTHS = tuple(eighth / 8 for eighth in range(9))
"""Shares of the optimizer on the host that are tried. With quarters, Llama 3 70B on half of an H100 takes 0.4 % longer; with
halves, DeepSeek-V2-Lite on 40 % of one 4.0 %."""

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
        return least_bytes(with_share(job, steps / STEPS), setting) <= job.memory_budget_bytes

    return with_share(job, bisect_left(range(STEPS), True, key=fits) / STEPS)


def with_share(job: Job, share: float) -> Job:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"offload": share})})


def ways(job: Job) -> list[Job]:
    """Return the jobs in which every setting that this one leaves open is decided."""
    decided = [job]
    for setting in (_rotary, _heads, _graphs, _shares, _copies):
        decided = [way for each in decided for way in setting(each)]
    return decided


def worth(asked: Job, way: Job, best: Plan | None) -> float:
    """Return the relative gain over the best plan of earlier ways from which a way is taken; infinite if it may not be taken.

    `best`: None if no earlier way fits.
    """
    turns_again = way.batch.packed != asked.batch.packed
    keeps_copies = way.model.fp8 != asked.model.fp8 and way.model.fp8 is not None and bool(way.model.fp8.copies_kept)
    if (turns_again and best is not None) or (keeps_copies and (best is None or not best.checkpointed)):
        return inf
    return WORTH_BITS if way.head != asked.head and way.head is not None and bounded_by_device(asked) else 0.0


def _rotary(job: Job) -> list[Job]:
    """RoPE of packed sequences kept, or recomputed, which makes the host wait for the device."""
    recomputed = job.model_copy(update={"batch": job.batch.model_copy(update={"packed": False})})
    return [job, recomputed] if job.rotary_asks_host else [job]


def _heads(job: Job) -> list[Job]:
    """The whole head, or the fewest pieces with which the loss is not the last stage's fullest moment."""
    if job.head is None or job.head.pieces != "auto":
        return [job]
    return [job.model_copy(update={"head": None}), *filter(None, [with_pieces(job)])]


def _graphs(job: Job) -> list[Job]:
    return [job, job.with_captured(())] if job.model.captured else [job]


def _shares(job: Job) -> list[Job]:
    """Shares of the optimizer on the host, up to the least with which everything could be kept. Optimizer bytes cost seconds of
    the update, once per step; activation bytes cost seconds in each micro-batch."""
    if job.optimizer.offload != "auto":
        return [job]
    enough = least_share_that_fits(job)
    return [*(with_share(job, share) for share in EIGHTHS if share < enough.optimizer.offloaded), enough]


def _copies(job: Job) -> list[Job]:
    """In FP8, a checkpointed half recomputes its last linear's input, or keeps its FP8 copy, which holds more."""
    if job.model.fp8 is None or job.model.fp8.copies_kept is not None:
        return [job]
    return [with_copies(job, kept=False), with_copies(job, kept=True)]


def with_least_memory(job: Job) -> Job:
    """Return the way that needs the least memory, which is the last that is tried if none fits."""
    return [way for way in ways(job) if worth(job, way, None) < inf][-1]


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
