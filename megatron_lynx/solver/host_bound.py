"""Solves stages on which the host is slower than the device. Recomputation in a window is not free there, because it is issued.

    forward     ├── device ──┤                        backward    ├──── device ────┤├─ exposed ─┤
                ├─── host: kept ───┤                              ├────── host: kept ──────┤├─ recomputation issued ─┤

    a micro-batch takes     max(device, host) forward  +  max(device + exposed, host) backward

[1] If the solver's answer is not bound by the host, it stays. So does an answer with groups of layers that keep one input.
[2] Otherwise the solver solves again with options that cost part of their exposed seconds and part of their host seconds. The
    fastest answer is taken. Ties go to the least host time.

Solvers minimise sums, and a maximum of two sums is none, so [2] need not find the best answer. It is exact if only the host or
only the device counts, and never slower than the solver's own answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_lynx.config.job import Job
from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds, offloading_host_s
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.solver.answer import Solved, Solver, layers_of
from megatron_lynx.solver.problem import Choices, Option, StageProblem
from megatron_lynx.units import SECOND_DIGITS

WEIGHTS = (0.5, 0.99)
"""Weights of host seconds in an option's cost; below 1, so that exposed seconds break ties."""


def solve(problem: StageProblem, solver: Solver) -> Solved:
    """Return the solver's answer, or a better one if that is host-bound. Raises `Infeasible` as `solver` does."""
    answer = solver(problem)
    if problem.device is None or problem.budget_bytes is None or answer.grouped or not late_s(problem, answer):  # [1]
        return answer
    candidates = [_restored(problem, solver(_weighted(problem, weight))) for weight in WEIGHTS]  # [2]
    return min(
        (answer, *candidates),
        key=lambda candidate: (round(candidate.longer_s + late_s(problem, candidate), SECOND_DIGITS), host_of(candidate).both_s),
    )


def late_s(problem: StageProblem, answer: Solved) -> float:
    """Return the seconds that a micro-batch takes longer because of the host; 0 if host seconds are unknown."""
    if problem.device is None:
        return 0.0
    return host_of(answer).beyond(problem.device.forward_s, problem.device.backward_s + answer.longer_s)


def host_of_stage(job: Job, profile: Profile, stage: int, chunks: Iterable[Solved], *, offloads: bool) -> HostSeconds:
    """Return the host seconds to issue one micro-batch through all chunks of a stage. `offloads`: whether some of it is
    offloaded."""
    host = sum((host_of(chunk) for chunk in chunks), start=NO_HOST_TIME)
    if not offloads:
        return host
    halves = job.halves_on(stage).items() if profile.host_time is not None else ()
    return sum((offloading_host_s(profile, section) * count for section, count in halves), start=host)


def host_of(answer: Solved) -> HostSeconds:
    """Return the host seconds to issue one micro-batch."""
    return sum((half.host for half in answer.halves), start=NO_HOST_TIME)


def _weighted(problem: StageProblem, weight: float) -> StageProblem:
    """Return the problem with host seconds weighted so in its costs."""
    attention, mlp, last_mlp = (_costing(choices, weight) for choices in (problem.attention, problem.mlp, problem.last_mlp))
    last_attention = problem.last_attention and _costing(problem.last_attention, weight)
    mixed = problem.mixed and problem.mixed.map(lambda choices: _costing(choices, weight))
    return replace(problem, attention=attention, mlp=mlp, last_mlp=last_mlp, last_attention=last_attention, mixed=mixed)


def _costing(choices: Choices, weight: float) -> Choices:
    least_s = min(option.host.both_s for option in choices)
    return Choices(
        replace(
            option, exposed_s=(1 - weight) * option.exposed_s + weight * (option.host.both_s - least_s + option.seat.spared_s)
        )
        for option in choices
    )


def _restored(problem: StageProblem, answer: Solved) -> Solved:
    """Return the answer to a weighted problem with the seconds that its options really expose."""
    halves = [_same(choices, option) for choices, option in zip(problem.halves, answer.halves, strict=True)]
    return replace(answer, layers=layers_of(halves), gap=None)


def _same(choices: Choices, option: Option) -> Option:
    return next(choice for choice in choices if _treatment(choice) == _treatment(option))


def _treatment(option: Option) -> object:
    return option.recompute, option.checkpoint, option.seat
