"""Answers for stages with experts in which all halves pay the same for a byte: where every combination would be too many.

    exposed │ o               Of each kind of half the options that some price of a byte makes the best one: the corners of the
    seconds │  \\              line below which no option lies. With the price all kinds go down their lines, one corner after
            │    o ─ _        the other, the cheapest step of any kind first.
            │          ─ o
            └────────────── bytes held

    free: all at their fastest ─> one kind's next corner ─> ... ─> all at their leanest       the first that fits is an answer

Each step changes one kind of half. So layers may be of two sorts, some before the last step and some behind it (`solver.mixed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from megatron_lynx.solver.answer import Solved, layers_of
from megatron_lynx.solver.problem import Choices, Option, StageProblem


class _Step(NamedTuple):
    """From one corner of a kind's line to the next."""

    price: float
    """Seconds for a byte."""
    corner: int
    """The number of the next one: of steps with one price the earlier corner comes first."""
    kind: int
    """By identity of its choices."""
    option: Option


def at_rising_prices(problem: StageProblem) -> Iterator[Solved]:
    """Answers, the fastest first; each holds less than the one before while backward is not in it."""
    lines = {id(choices): line(choices, problem.in_flight) for choices in problem.halves}
    chosen = {kind: corners[0] for kind, corners in lines.items()}
    steps = [step for kind, corners in lines.items() for step in _steps(kind, corners, problem.in_flight)]
    yield _answer(problem, chosen)
    for step in sorted(steps, key=lambda step: step[:2]):
        chosen[step.kind] = step.option
        yield _answer(problem, chosen)


def line(choices: Choices, in_flight: float) -> list[Option]:
    """The corners, from the fastest option to the one that holds least. Of equals the one that holds least while backward is in
    its half, or in the one before."""
    corners: list[Option] = []
    for option in sorted(choices, key=lambda each: (each.longer_s, _held(each, in_flight), _there(each))):
        if corners and _held(option, in_flight) >= _held(corners[-1], in_flight):
            continue
        while len(corners) > 1 and _price(corners[-2], option, in_flight) <= _price(corners[-2], corners[-1], in_flight):
            corners.pop()
        corners.append(option)
    return corners


def _steps(kind: int, corners: list[Option], in_flight: float) -> Iterator[_Step]:
    for number, (before, behind) in enumerate(pairwise(corners), start=1):
        yield _Step(_price(before, behind, in_flight), number, kind, behind)


def _price(faster: Option, leaner: Option, in_flight: float) -> float:
    return (leaner.longer_s - faster.longer_s) / (_held(faster, in_flight) - _held(leaner, in_flight))


def _held(option: Option, in_flight: float) -> float:
    """What it holds while backward is elsewhere, of all micro-batches."""
    return in_flight * option.memory.resident + option.memory.early


def _there(option: Option) -> int:
    return option.memory.whole + option.memory.ahead + option.memory.ahead2


def _answer(problem: StageProblem, chosen: dict[int, Option]) -> Solved:
    halves = [chosen[id(choices)] for choices in problem.halves]
    return Solved(layers_of(halves), problem.in_flight, loss_bytes=problem.loss_bytes)
