"""Decides whether the head runs in pieces where a job leaves that to the planner (`head: {pieces: auto}`), and in how many.

The fewest pieces are tried with which the loss is no longer what the last stage holds most of: more would only cost seconds. The
plan with them is taken where none fits without, or where its step is that much shorter that it is worth bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_lynx.config.job import Head, Job
from megatron_lynx.errors import Problem
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.solver.stage_budget import beside_layers

LEAST_TOKENS = {"cuda": 1024, "cpu": 1}
"""Of a piece: GEMMs of fewer rows do not fill a GPU."""

WORTH_BITS = 5e-3
"""The part of a step that must be gained for a gradient that is not stock's in every bit."""


def with_pieces(job: Job) -> Job | None:
    """The job with its head in as many pieces as help; None where it is whole, or helps as it is."""
    if job.schedule == "double_buffered" or not _loss_binds(job):
        return None
    several = list(_several(job))
    return next((each for each in several if not _loss_binds(each)), several[-1] if several else None)


def whole(job: Job) -> Job:
    """The job with stock's head."""
    return job.model_copy(update={"head": None})


def inexact_change(job: Job, profile: Profile, plannable: Callable[[Job, Profile], bool]) -> Iterator[Problem]:
    """One problem that says that a job which does not fit would fit with its head in pieces, or none. `plannable`: asked last."""
    pieced = with_pieces(job) if job.head is None else None
    if pieced is not None and plannable(pieced, profile):
        todo = "plan with --inexact head: the gradient of one weight is then another sum (docs/head_in_pieces.md)"
        yield Problem("inexact change that fits", f"head.pieces: {pieced.head_pieces}", "", todo)


def _several(job: Job) -> Iterator[Job]:
    """The job with its head in 2, 4, 8, ... pieces."""
    rows, pieces = job.model.seq // job.parallel.context, 2
    while rows % pieces == 0 and rows // pieces * job.batch.micro >= LEAST_TOKENS[job.cluster.device]:
        yield job.model_copy(update={"head": Head(pieces=pieces)})
        pieces *= 2


def _loss_binds(job: Job) -> bool:
    """Whether the last stage holds more beside its layers when the loss is computed than when they run backward."""
    parts = beside_layers(job, job.parallel.pipeline - 1)
    return max(parts.at("loss").total, parts.at("head_backward").total) > parts.at("backward").total
