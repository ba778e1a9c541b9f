"""What one rank's thread spends on a step, setting by setting, and in which functions. Runs inside `RankPool`, on all ranks."""

from __future__ import annotations

import cProfile
import pstats
from io import StringIO

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.comparison import subjects_of
from megatron_lynx.testbed.host_time import spent_in_steps
from megatron_lynx.testbed.profiling import measure_rank
from megatron_lynx.timeline import Passes


def host_seconds(rank: int, job: Job, candidates: list[Candidate], rounds: int, steps: int) -> dict[str, list[Passes]]:
    """Host seconds of so many steps in each of so many turns, by setting."""
    return spent_in_steps(subjects_of(job, candidates), rounds, steps)


def forwards_ms(rank: int, job: Job, repetitions: int) -> dict[str, float]:
    """Milliseconds of each item's forward in one layer, without a plan."""
    halves = measure_rank(rank, job, repetitions).halves
    return {name: 1e3 * item.forward_s for half in halves.values() for name, item in half.items.items()}


def profiled(rank: int, job: Job, candidate: Candidate, steps: int, lines: int) -> str:
    """Which functions a setting's time is spent in, by their own time."""
    subject = subjects_of(job, [NONE, candidate])[candidate.name]
    profile, report = cProfile.Profile(), StringIO()
    with subject.in_force():
        subject.uncleared_step()
        profile.enable()
        for _ in range(steps):
            subject.uncleared_step()
        profile.disable()
    pstats.Stats(profile, stream=report).sort_stats("tottime").print_stats(lines)
    return report.getvalue()
