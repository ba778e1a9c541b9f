"""The first pass of a comparison, on every rank: what each setting holds, and whether its gradients are stock's.

    none ── one step ──> losses and gradients that all others must equal in every bit
    each candidate ── one step: gradients, counts of replays; it warms up as well
                   └─ one step: bytes
    opponents ── module sets, all that run, and with Transformer Engine's layers sets of offloaded modules; block N from almost
                 all layers down, until one holds more than ours

Whether a module set runs at all is tried by each rank for itself, before: a stage that fails would leave the next one waiting.

Nothing is timed here, so it runs over an unshaped link, in processes started as `process_peak` wants them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.config.overlap import Overlap
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.measure import process_peak
from megatron_lynx.measure.measurement import CounterCheck, Skipped
from megatron_lynx.measure.memory import MemoryUse
from megatron_lynx.plan.plan import Plan
from megatron_lynx.runtime.progress import Counts
from megatron_lynx.testbed.candidates import (
    FULL,
    NONE,
    SELECTIVE,
    Candidate,
    blocks,
    checkpointed,
    module_sets,
    no_offloading,
    offload_sets,
    ours,
)
from megatron_lynx.testbed.fused_gradient import fused_gradients
from megatron_lynx.testbed.subject import Subject, most_of_all_ranks, same_bits

Bits = dict[str, torch.Tensor]
"""Losses and gradients, by name."""


@dataclass(frozen=True)
class Counted:
    """One setting on one rank."""

    candidate: Candidate
    use: MemoryUse
    most_resident_bytes: int
    """The most of all ranks, as is `most_peak_bytes`."""
    most_peak_bytes: int
    counts: Counts
    gradients_equal: bool | None

    def holds_no_more_than(self, other: Counted) -> bool:
        """Whether it holds no more than `other` by either count of bytes, and so can be an opponent."""
        return self.most_resident_bytes <= other.most_resident_bytes or self.most_peak_bytes <= other.most_peak_bytes


@dataclass
class Census:
    """What one rank counted. The ranks' lists are alike: same settings, same order."""

    counted: list[Counted] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    check: CounterCheck | None = None

    def of(self, name: str) -> Counted:
        return next(each for each in self.counted if each.candidate.name == name)


def take_census(rank: int, job: Job, plan: Plan, module_sets_too: bool = True) -> Census:
    """Runs inside `RankPool`, on all ranks of the job.

    Stock's module sets are first tried on each rank alone, which makes Megatron's groups anew: not for ranks whose other ranks
    do not exist.
    """
    from megatron_lynx.testbed.groups import initialise

    failing = _failing(job) if module_sets_too else []
    initialise(job)
    with fused_gradients(job):
        return _census(job, plan, Census([], failing), module_sets_too)


def _census(job: Job, plan: Plan, census: Census, module_sets_too: bool) -> Census:
    none = Subject(job, NONE)
    reference = none.repeatable_step()
    census.counted.append(_count(none))
    for candidate in (SELECTIVE, FULL, *checkpointed(plan), *ours(plan)):
        census.counted.append(_count(Subject(job, candidate, none), reference))
    if module_sets_too:
        _count_module_sets(census, job, none, reference)
        _count_offload_sets(census, job, none, reference)
    _count_blocks(census, job, none, reference)
    census.check = _check_of(none)
    return census


def _count(subject: Subject, reference: Bits | None = None) -> Counted:
    """Count one setting. Without a reference the subject is the reference itself, and already warmed up."""
    equal, counts = None, Counts()
    with subject.in_force() as installation:
        if reference is not None:
            equal = same_bits(subject.repeatable_step(), reference)
        if installation is not None:
            counts = installation.engine.take_counts()
        use = subject.counted_step()
    most_resident, most_peak = most_of_all_ranks((use.resident_bytes, use.peak_bytes), subject.device)
    return Counted(subject.candidate, use, most_resident, most_peak, counts, equal)


def _count_module_sets(census: Census, job: Job, none: Subject, reference: Bits) -> None:
    failing = {skipped.name for skipped in census.skipped}
    for candidate in module_sets(job):
        if candidate.name not in failing:
            census.counted.append(_count(Subject(job, candidate, none), reference))


def _count_offload_sets(census: Census, job: Job, none: Subject, reference: Bits) -> None:
    """Count what stock offloads, after one step more: in its first one it only learns what there is."""
    for candidate in offload_sets(job):
        subject = Subject(job, candidate, none)
        subject.repeatable_step()
        census.counted.append(_count(subject, reference))
    if reason := no_offloading(job):
        census.skipped.append(Skipped(name="stock offload", reason=reason))


def _count_blocks(census: Census, job: Job, none: Subject, reference: Bits) -> None:
    """Count block settings until one is no opponent any more: each holds more than the one before it."""
    for candidate in blocks(job):
        counted = _count(Subject(job, candidate, none), reference)
        census.counted.append(counted)
        if not counted.holds_no_more_than(census.of("ours")):
            break


def _failing(job: Job) -> list[Skipped]:
    """The module sets that stock Megatron cannot train with, and why."""
    from megatron_lynx.testbed.groups import initialise

    alone = _alone(job)
    initialise(alone)
    reasons = {candidate.name: candidate.known_to_fail or _error_of(alone, candidate) for candidate in module_sets(job)}
    return [Skipped(name=name, reason=reason) for name, reason in reasons.items() if reason is not None]


def _error_of(alone: Job, candidate: Candidate) -> str | None:
    try:
        Subject(alone, candidate).step()
    except Exception as error:  # noqa: BLE001 (stock Megatron's, of any kind; the report says which)
        return f"stock Megatron raised {type(error).__name__}: {error}".splitlines()[0]
    return None


def _alone(job: Job) -> Job:
    """A job with the same kind of model but one narrow layer, which every rank trains alone: nothing reduces its gradients."""
    size = {"layers": 1, "hidden": 8 * job.model.heads, "ffn": 16, "vocab": 16, "seq": 8}
    batch = job.batch.model_copy(update={"global_": job.batch.micro * job.gpus})
    model = job.model.model_copy(update=size)
    return job.model_copy(update={"model": model, "parallel": Parallel(), "batch": batch, "overlap": Overlap()})


def _check_of(subject: Subject) -> CounterCheck | None:
    """The counter against the process's real peak, in a step of a setting that holds much."""
    if subject.device.type != "cpu":
        return None
    if why_not := process_peak.why_unavailable():
        return CounterCheck(counted_bytes=subject.counted_step().peak_bytes, why_not=why_not)
    return process_peak.check_counter(subject.uncleared_step)
