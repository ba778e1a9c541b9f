"""Solves stages on which the host is slower than the device: there a replay that a window hides is not free, as it is issued.

    forward     ├── device ──┤                        backward    ├──── device ────┤├─ exposed ─┤
                ├─── host: kept ───┤                              ├────── host: kept ──────┤├─ replays issued ─┤

    a micro-batch takes     max(device, host) forward  +  max(device + exposed, host) backward

[1] where the solver's own answer leaves no pass to the host, it stays as it is, and nothing else is done; nor where nothing fits
    but with groups of layers that keep one input
[2] else it is asked again, with options that cost a part of what they expose and the other part of what they add to the host's
    seconds; of these answers and its own, the one whose micro-batch is shortest is taken. Ties go to the least host time

The larger of two sums is not a sum, which is all that the solvers can make least, so [2] need not find the best answer: it is
exact where only the host counts, or only the device, and no answer is slower than the solver's own.
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
"""The parts of an option's cost that are the host's. Not all of it, so that exposed seconds decide between equals."""


def solve(problem: StageProblem, solver: Solver) -> Solved:
    """The solver's answer, or a better one where the stage is host-bound under it. Raises `Infeasible` as `solver` does."""
    answer = solver(problem)
    if problem.device is None or problem.budget_bytes is None or answer.grouped or not late_s(problem, answer):  # [1]
        return answer
    others = [_restored(problem, solver(_weighted(problem, weight))) for weight in WEIGHTS]  # [2]
    return min(
        (answer, *others),
        key=lambda each: (round(each.longer_s + late_s(problem, each), SECOND_DIGITS), host_of(each).both_s),
    )


def late_s(problem: StageProblem, answer: Solved) -> float:
    """By how much the passes of a micro-batch are longer because of the host; 0 where its time is not known."""
    if problem.device is None:
        return 0.0
    return host_of(answer).beyond(problem.device.forward_s, problem.device.backward_s + answer.longer_s)


def host_of_stage(job: Job, profile: Profile, stage: int, chunks: Iterable[Solved], *, offloads: bool) -> HostSeconds:
    """What the host needs to issue one micro-batch through all chunks of a stage. `offloads`: whether any of it is offloaded."""
    host = sum((host_of(chunk) for chunk in chunks), start=NO_HOST_TIME)
    if not offloads:
        return host
    halves = job.halves_on(stage).items() if profile.host_time is not None else ()
    return sum((offloading_host_s(profile, section) * count for section, count in halves), start=host)


def host_of(answer: Solved) -> HostSeconds:
    """What the host needs to issue one micro-batch."""
    return sum((half.host for half in answer.halves), start=NO_HOST_TIME)


def _weighted(problem: StageProblem, weight: float) -> StageProblem:
    """The same problem, with costs of which so much is the host's."""
    attention, mlp, last_mlp = (_costing(choices, weight) for choices in (problem.attention, problem.mlp, problem.last_mlp))
    last_attention = problem.last_attention and _costing(problem.last_attention, weight)
    mixed = problem.mixed and problem.mixed.each(lambda choices: _costing(choices, weight))
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
    """The answer to a weighted problem, with the seconds that its options really expose."""
    halves = [_same(choices, option) for choices, option in zip(problem.halves, answer.halves, strict=True)]
    return replace(answer, layers=layers_of(halves), gap=None)


def _same(choices: Choices, option: Option) -> Option:
    return next(each for each in choices if _treatment(each) == _treatment(option))


def _treatment(option: Option) -> object:
    return option.replay, option.checkpoint, option.seat
