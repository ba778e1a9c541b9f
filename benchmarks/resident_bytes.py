"""What a layer leaves in memory between its forward and its backward, on ranks of the testbed."""

from __future__ import annotations

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.comparison import Subject
from megatron_lynx.testbed.fusions import fused_gradients


def count(rank: int, job: Job, candidates: list[Candidate]) -> dict[str, int]:
    """Bytes that each setting holds at the end of the forward pass, beyond the level at its start. Runs on a rank."""
    from tests.instruments.groups import initialise

    initialise(job)
    held = {}
    with fused_gradients(job):
        first = Subject(job, NONE)
        for candidate in candidates:
            subject = Subject(job, candidate, first)
            with subject.in_force():
                subject.step()
                held[candidate.name] = subject.counted_step().resident_bytes
    return held
