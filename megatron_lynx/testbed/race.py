"""The second pass of a comparison, on every rank: how long a step takes under each setting, and one traced step of each plan.

    settings take turns ── a plan is installed before its turn and removed after it, untimed ──> seconds
    each plan           ── one step more, its trace on                                       ──> events

Nothing is counted in these processes: the allocator's books, once on, cost time.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_lynx.config.job import Job
from megatron_lynx.measure.steps import time_alternating
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.fused_gradient import fused_gradients
from megatron_lynx.testbed.subject import Subject, subjects_of


@dataclass(frozen=True)
class Lap:
    """What one setting took on one rank."""

    step_s: tuple[float, ...]
    events: list[dict[str, Any]]
    """Events of one more step, traced; empty without a plan."""


def race(rank: int, job: Job, candidates: list[Candidate], rounds: int, warmups: int) -> dict[str, Lap]:
    """Runs inside `RankPool`, on all ranks of the job. Laps by the names of `candidates`, of which the first is stock none."""
    with fused_gradients(job):
        return laps_of(subjects_of(job, candidates), rounds, warmups)


def laps_of(subjects: dict[str, Subject], rounds: int, warmups: int) -> dict[str, Lap]:
    """Of settings that take turns, stock none among them: the plan of the one whose turn it is is in force, and no other's."""
    with ExitStack() as in_force:

        def take_turn(name: str) -> None:
            in_force.close()
            in_force.enter_context(subjects[name].in_force())

        samples = time_alternating(
            {name: subject.step for name, subject in subjects.items()},
            rounds=rounds,
            warmups=warmups,
            prepare=take_turn,
            barrier=dist.barrier,
            device=subjects[NONE.name].device,
        )
    return {name: Lap(samples[name], _trace(subject)) for name, subject in subjects.items()}


def _trace(subject: Subject) -> list[dict[str, Any]]:
    with subject.in_force() as installation:
        return [] if installation is None else subject.traced_step(installation)
