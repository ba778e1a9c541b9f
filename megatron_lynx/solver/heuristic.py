"""The per-layer solver: identical layers get identical choices, as far as the budget is worth it (Lynx's HEU, our formulation).

    layers of one stage     1 ... n-k-1     n-k ... n-1          n
    choice                      X               Y           attention as the layer below, last MLP half Z

X, Y and Z run over every choice that no other one beats, Y over those faster than X; k is the most layers of Y that fit, or none.
Exact among answers of this form, by enumeration, and deterministic.

    with a budget     least exposed seconds, then least peak, then fewest resident bytes
    without one       least peak, then least exposed seconds, then fewest resident bytes
The last tie goes to the choice that comes first in the problem. More budget allows every answer that less allows, so it never
costs time. An on-demand replay is exposed whole, so a window never makes an answer worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from megatron_lynx.cost.memory import HalfMemory, peak_bytes, resident_bytes
from megatron_lynx.solver.answer import LayerChoice, Solved, infeasible
from megatron_lynx.solver.problem import Option, StageProblem

SECOND_DIGITS = 12
"""Seconds that agree to a picosecond are equal: sums of floats in another order must not decide."""


@dataclass(frozen=True)
class _Candidate:
    """An answer before it is spelt out: `count` layers of `faster` above those of `usual`, and the last MLP half."""

    problem: StageProblem
    usual: LayerChoice
    faster: LayerChoice
    last: Option
    count: int = 0

    @property
    def top(self) -> LayerChoice:
        return self.faster if self.count else self.usual

    @property
    def usual_count(self) -> int:
        return self.problem.layers - 1 - self.count

    @cached_property
    def exposed_s(self) -> float:
        below_last = self.usual_count * self.usual.exposed_s + self.count * self.faster.exposed_s
        return round(below_last + self.top.attention.exposed_s + self.last.exposed_s, SECOND_DIGITS)

    @cached_property
    def peak_bytes(self) -> int:
        return peak_bytes(self._abridged, self.problem.in_flight)

    @property
    def resident_bytes(self) -> int:
        return resident_bytes(self._abridged)

    @property
    def _abridged(self) -> tuple[HalfMemory, ...]:
        """Backward order with the same peak: of layers that are alike, the first and the last matter."""
        above = (self.last.memory, self.top.attention.memory)
        return (*above, *_abridged(self.faster, self.count), *_abridged(self.usual, self.usual_count))

    def answer(self) -> Solved:
        below_last = (self.usual,) * self.usual_count + (self.faster,) * self.count
        return Solved((*below_last, LayerChoice(self.top.attention, self.last)), self.problem.in_flight)


def solve(problem: StageProblem) -> Solved:
    """The best answer. Raises `Infeasible` when not even the least memory fits the budget."""
    least = min(_uniform(problem), key=_memory_first)
    if problem.budget_bytes is None:
        return least.answer()
    if least.peak_bytes > problem.budget_bytes:
        raise infeasible(problem, least.answer())
    return min(_fitting(problem, problem.budget_bytes), key=_time_first).answer()


def _uniform(problem: StageProblem) -> Iterator[_Candidate]:
    for last, usual in product(_unbeaten(problem.last_mlp), _unbeaten_layers(problem)):
        yield _Candidate(problem, usual, usual, last)


def _fitting(problem: StageProblem, budget_bytes: int) -> Iterator[_Candidate]:
    """For every X, Y and Z the fitting answer with the most layers of Y, unless one before it was faster."""
    layers = _unbeaten_layers(problem)
    least_exposed_s = float("inf")
    for candidate in _uniform(problem):
        if candidate.exposed_s <= least_exposed_s and candidate.peak_bytes <= budget_bytes:
            least_exposed_s = candidate.exposed_s
            yield candidate
        for faster in _faster_than(candidate.usual, layers):
            for count in range(_most(candidate.usual, faster, problem, budget_bytes), 0, -1):
                mixed = replace(candidate, faster=faster, count=count)
                if mixed.exposed_s > least_exposed_s:
                    break  # fewer faster layers expose more
                if mixed.peak_bytes <= budget_bytes:
                    least_exposed_s = mixed.exposed_s
                    yield mixed
                    break


def _most(usual: LayerChoice, faster: LayerChoice, problem: StageProblem, budget_bytes: int) -> int:
    """How many faster layers may fit at most: what stays resident must, whatever else is held."""
    each = faster.resident_bytes - usual.resident_bytes
    below_last = budget_bytes // problem.in_flight - (problem.layers - 1) * usual.resident_bytes
    return min(problem.layers - 1, max(0, below_last) // each) if each > 0 else problem.layers - 1


def _faster_than(usual: LayerChoice, layers: Sequence[LayerChoice]) -> list[LayerChoice]:
    return [layer for layer in layers if layer.exposed_s < usual.exposed_s]


def _abridged(layer: LayerChoice, count: int) -> tuple[HalfMemory, ...]:
    backward = (layer.mlp.memory, layer.attention.memory)
    if count <= 2:
        return backward * count
    between = HalfMemory((count - 2) * resident_bytes(backward), 0, 0, ahead=layer.mlp.memory.ahead)
    return (*backward, between, *backward)


def _unbeaten_layers(problem: StageProblem) -> list[LayerChoice]:
    return [LayerChoice(*halves) for halves in product(_unbeaten(problem.attention), _unbeaten(problem.mlp))]


def _unbeaten(options: Sequence[Option]) -> list[Option]:
    """Without those that another one beats or equals (the first of equals stays) in time and in every kind of memory."""
    costs = [_cost(option) for option in options]
    return [
        option for index, option in enumerate(options) if not any(_beats(costs, other, index) for other in range(len(options)))
    ]


def _cost(option: Option) -> tuple[float, ...]:
    memory = option.memory
    return round(option.exposed_s, SECOND_DIGITS), memory.resident, memory.whole, memory.ahead, memory.tail


def _beats(costs: Sequence[tuple[float, ...]], one: int, other: int) -> bool:
    no_worse = all(a <= b for a, b in zip(costs[one], costs[other], strict=True))
    return no_worse and (costs[one] != costs[other] or one < other)


def _memory_first(answer: _Candidate) -> tuple[float, ...]:
    return answer.peak_bytes, answer.exposed_s, answer.resident_bytes


def _time_first(answer: _Candidate) -> tuple[float, ...]:
    return answer.exposed_s, answer.peak_bytes, answer.resident_bytes
