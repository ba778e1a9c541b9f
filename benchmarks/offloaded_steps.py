"""What a rank of the testbed holds under plans that offload, and how long its steps take.

held     every setting once, the allocator's books on
timed    round by round, settings in turns     install ── a step, not timed: the host pool is made ──┤ step ├┤ step ├
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.comparison import Subject


@dataclass(frozen=True)
class Timed:
    """One step of one setting on one rank."""

    step_s: float
    exposed_copy_s: float = 0.0
    copied_bytes: int = 0
    host_bytes: int = 0


def held(rank: int, job: Job, candidates: list[Candidate]) -> dict[str, int]:
    """Bytes at the end of the forward that holds most. Runs inside `RankPool`, on all ranks of the job."""
    subjects = _subjects(job, candidates)
    return {name: _held_bytes(rank, number, subjects[name]) for number, name in enumerate(subjects)}


def timed(rank: int, job: Job, candidates: list[Candidate], rounds: int, steps: int) -> dict[str, list[list[Timed]]]:
    """Seconds of so many steps, by setting and round. Runs inside `RankPool`, on all ranks of the job."""
    subjects = _subjects(job, candidates)
    samples: dict[str, list[list[Timed]]] = {name: [] for name in subjects}
    for number in range(rounds):
        begin_s = time.perf_counter()
        for name, subject in subjects.items():
            samples[name].append(_turn(subject, steps))
        _say(rank, f"round {number + 1} of {rounds}: {time.perf_counter() - begin_s:.0f} s")
    return samples


def _subjects(job: Job, candidates: list[Candidate]) -> dict[str, Subject]:
    from tests.instruments.groups import initialise

    initialise(job)
    first = Subject(job, NONE)
    return {each.name: Subject(job, each, first) for each in candidates}


def _held_bytes(rank: int, number: int, subject: Subject) -> int:
    _say(rank, f"counting what setting {number + 1} holds: {subject.candidate.name}")
    with subject.in_force():
        subject.step()
        return subject.counted_step().resident_bytes


def _turn(subject: Subject, steps: int) -> list[Timed]:
    with subject.in_force() as installation:
        subject.step()
        if installation is not None:
            installation.engine.take_counts()
        return [_step(subject, installation) for _ in range(steps)]


def _step(subject: Subject, installation: Any) -> Timed:
    dist.barrier()
    begin_s = time.perf_counter()
    subject.step()
    step_s = time.perf_counter() - begin_s
    if installation is None:
        return Timed(step_s)
    counts = installation.engine.take_counts()
    copied_bytes = counts.offloaded_bytes + counts.reloaded_bytes
    return Timed(step_s, counts.exposed_copy_s, copied_bytes, counts.host_bytes)


def _say(rank: int, what: str) -> None:
    if rank == 0:
        print(what, file=sys.stderr, flush=True)
