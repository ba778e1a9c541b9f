"""Clocks on the thread that issues a step's work: its forwards and backwards, and the halves in them.

    a turn    the setting's plan is installed ── one step that does not count ──┤ step ├┤ step ├── it is removed
    a step    Megatron's `forward_step` calls, hooks of the plan included ──> forward     `backward_step` calls ──> backward

What counts is processor time of the threads that issue, the device idle at the beginning of a step. Waiting for another rank is
not in it, and another process on the same core adds nothing but cold caches.

    on a CPU      the calling thread issues forwards and backwards
    on a GPU      the calling thread issues forwards, a thread of autograd's issues backwards: one for each device, which lives as
                  long as the process

What other threads of the process take (communication's, the driver's, one that looks whether collectives are late) holds up
nobody, and is in no figure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy import DENSE, HALVES, Half
from megatron_lynx.nest import all_in
from megatron_lynx.runtime.device import device_for
from megatron_lynx.testbed.subject import Subject

Clock = Callable[[], float]
"""Seconds since some moment."""


def issuing_clock(device: torch.device) -> Clock:
    """Processor seconds of the threads that issue work to a device. Called in the one that issues forwards."""
    threads = {threading.get_ident()}
    some = torch.zeros(1, device=device, requires_grad=True) * 1
    some.register_hook(lambda _: threads.add(threading.get_ident()))
    some.backward()
    clocks = [time.pthread_getcpuclockid(thread) for thread in threads]
    return lambda: sum(map(time.clock_gettime, clocks))


@dataclass(frozen=True)
class Spent:
    """Host seconds of forwards, and of backwards."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.forward_s - other.forward_s, self.backward_s - other.backward_s)

    def at_least(self, other: Spent) -> Spent:
        return Spent(max(self.forward_s, other.forward_s), max(self.backward_s, other.backward_s))

    def __mul__(self, share: Spent | float) -> Spent:
        by = share if isinstance(share, Spent) else Spent(share, share)
        return Spent(by.forward_s * self.forward_s, by.backward_s * self.backward_s)


def least_of_steps(subjects: Mapping[str, Subject], rounds: int, steps: int, clock: Clock | None = None) -> dict[str, Spent]:
    """The least that a step of each subject takes, forwards and backwards apart: whatever else runs here only adds to that."""
    return {
        name: Spent(min(one.forward_s for one in found), min(one.backward_s for one in found))
        for name, found in spent_in_steps(subjects, rounds, steps, clock).items()
    }


def spent_in_steps(
    subjects: Mapping[str, Subject], rounds: int, steps: int, clock: Clock | None = None
) -> dict[str, list[Spent]]:
    """What each step of each subject takes, by the issuing threads' clock or another. Subjects take turns."""
    samples: dict[str, list[Spent]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            with subject.in_force():
                subject.uncleared_step()
                samples[name] += [_timed_step(subject, clock or issuing_clock(subject.device)) for _ in range(steps)]
    return samples


def shares_of_halves(subject: Subject, steps: int) -> dict[Half, Spent]:
    """Each half's part of a stock layer's forward, and of its backward: between two halves there is one tensor, whose gradient
    comes when the one half's backward is over and the other's begins."""
    subject.uncleared_step()
    clock = issuing_clock(subject.device)
    forward: dict[Half, float] = dict.fromkeys(HALVES, 0.0)
    backward: dict[Half, float] = dict.fromkeys(HALVES, 0.0)
    for _ in range(steps):
        marks: list[tuple[Half, float]] = []
        with _marked_halves(forward, marks, clock):
            _idle_step(subject)
        for (half, begin_s), (following, end_s) in pairwise(marks):
            if half != following:  # what lies between two micro-batches is nobody's
                backward[half] += end_s - begin_s
    whole_s = Spent(sum(forward.values()), sum(backward.values()))
    return {half: Spent(forward[half] / whole_s.forward_s, backward[half] / whole_s.backward_s) for half in HALVES}


def _idle_step(subject: Subject) -> None:
    """A step that begins on an idle device: the host never waits because a device's queue is full."""
    device_for(subject.device).synchronize()
    subject.uncleared_step()


def _timed_step(subject: Subject, clock: Clock) -> Spent:
    seconds = {"forward_step": 0.0, "backward_step": 0.0}
    with _clocked_schedules(seconds, clock):
        _idle_step(subject)
    return Spent(seconds["forward_step"], seconds["backward_step"])


@contextmanager
def _clocked_schedules(seconds: dict[str, float], clock: Clock) -> Iterator[None]:
    """Clocks around whatever stands for Megatron's two functions now, the hooks of a plan included."""
    from megatron.core.pipeline_parallel import schedules

    originals = {name: getattr(schedules, name) for name in seconds}
    for name, original in originals.items():
        setattr(schedules, name, _clocked(original, seconds, name, clock))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(schedules, name, original)


@contextmanager
def _marked_halves(forward: dict[Half, float], marks: list[tuple[Half, float]], clock: Clock) -> Iterator[None]:
    """Clocks around the halves of Megatron's layers; a mark whenever the backward of one begins."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    originals = {section: TransformerLayer.__dict__[section.method] for section in DENSE.values()}
    for section, original in originals.items():
        clocked = _clocked(original, forward, section.half, clock)
        setattr(TransformerLayer, section.method, _marked(clocked, section.half, marks, clock))
    try:
        yield
    finally:
        for section, original in originals.items():
            setattr(TransformerLayer, section.method, original)


def _clocked(function: Callable[..., Any], seconds: dict[Any, float], name: str, clock: Clock) -> Callable[..., Any]:
    @wraps(function)
    def clocked(*args: Any, **kwargs: Any) -> Any:
        begin_s = clock()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += clock() - begin_s

    return clocked


def _marked(function: Callable[..., Any], half: Half, marks: list[tuple[Half, float]], clock: Clock) -> Callable[..., Any]:
    @wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        all_in(Tensor, result)[0].register_hook(lambda _: marks.append((half, clock())))
        return result

    return marked
