"""What a rank of the testbed holds, on device and host, under plans that offload."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.subject import Subject


@dataclass(frozen=True)
class Counted:
    """One setting on one rank."""

    held_bytes: int
    host_bytes: int
    exposed_copy_s: float


def count(rank: int, job: Job, candidates: list[Candidate]) -> dict[str, Counted]:
    """Runs inside `RankPool`, on all ranks of the job."""
    from megatron_lynx.testbed.training import initialise

    initialise(job)
    first = Subject(job, NONE)
    return {candidate.name: _counted(Subject(job, candidate, first)) for candidate in candidates}


def _counted(subject: Subject) -> Counted:
    with subject.in_force() as installation:
        subject.step()
        if installation is None:
            return Counted(subject.counted_step().resident_bytes, 0, 0.0)
        installation.engine.take_counts()
        subject.step()
        counts = installation.engine.take_counts()
        return Counted(subject.counted_step().resident_bytes, counts.host_bytes, counts.exposed_copy_s)
