"""Seconds that one rank's Python thread takes for the forwards and backwards of a step, setting by setting.

    a turn    install the setting's plan ── a step, not timed: recipes are learnt, host memory is made ──┤ step ├┤ step ├── remove
    a step    its `forward_step` calls, hooks of the plan included ──> forward      its `backward_step` calls ──> backward

What counts is the processor time of the thread that issues the work (`time.thread_time`). Waiting for another rank is not in it,
nor is the copying thread's work, and another process on the same core adds nothing but cold caches.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from io import StringIO
from typing import Any

import torch.distributed as dist

from megatron_lynx.config.job import Job
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.subject import Subject


@dataclass
class HostSeconds:
    """Of one step on one rank."""

    forward_s: float = 0.0
    backward_s: float = 0.0


def host_seconds(rank: int, job: Job, candidates: list[Candidate], rounds: int, steps: int) -> dict[str, list[HostSeconds]]:
    """Of so many steps in each of so many turns, by setting. Runs inside `RankPool`, on all ranks of the job."""
    subjects = _subjects(job, candidates)
    samples: dict[str, list[HostSeconds]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            with _in_turn(subject):
                samples[name] += [_timed_step(subject) for _ in range(steps)]
    return samples


def profiled(rank: int, job: Job, candidate: Candidate, steps: int, lines: int) -> str:
    """Which functions a setting's time is spent in, by their own time. Runs inside `RankPool`, on all ranks of the job."""
    subject = _subjects(job, [candidate])[candidate.name]
    profile, report = cProfile.Profile(), StringIO()
    with _in_turn(subject):
        profile.enable()
        for _ in range(steps):
            subject.uncleared_step()
        profile.disable()
    pstats.Stats(profile, stream=report).sort_stats("tottime").print_stats(lines)
    return report.getvalue()


def _subjects(job: Job, candidates: list[Candidate]) -> dict[str, Subject]:
    from megatron_lynx.testbed.groups import initialise

    initialise(job)
    first = Subject(job, NONE)
    return {each.name: Subject(job, each, first) for each in candidates}


@contextmanager
def _in_turn(subject: Subject) -> Iterator[None]:
    with subject.in_force():
        for _ in range(2):
            subject.uncleared_step()
        gc.collect()
        yield


def _timed_step(subject: Subject) -> HostSeconds:
    spent = HostSeconds()
    dist.barrier()
    with _clocks(spent):
        subject.uncleared_step()
    return spent


@contextmanager
def _clocks(spent: HostSeconds) -> Iterator[None]:
    """Around whatever stands for Megatron's two functions now, the hooks of a plan included."""
    from megatron.core.pipeline_parallel import schedules

    forward_step, backward_step = schedules.forward_step, schedules.backward_step
    schedules.forward_step = _clocked(forward_step, spent, "forward_s")
    schedules.backward_step = _clocked(backward_step, spent, "backward_s")
    try:
        yield
    finally:
        schedules.forward_step, schedules.backward_step = forward_step, backward_step


def _clocked(function: Callable[..., Any], spent: HostSeconds, name: str) -> Callable[..., Any]:
    @wraps(function)
    def clocked(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            setattr(spent, name, getattr(spent, name) + time.thread_time() - begin_s)

    return clocked
