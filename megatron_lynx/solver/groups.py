"""Groups of layers that keep one input together, for budgets that do not allow an input for each layer.

    layers of a stage     1  2  3 │ 4  5  6 │ 7  8  9  ...  n
    inputs kept           x         x         the solver's answer in the memory that is left

Groups are the lowest layers. When the backward of one begins, all of it is recomputed at once, and the layers above are finished.
Larger groups keep less and recompute more at once, so every size and number of groups is considered:

[1] A lower bound of each way is the least that the other layers keep,  beside the groups' own bytes, also while each of them runs
    backward. Most ways are excluded by it.
[2] Some of the others are solved, ordered by the number of layers that keep no input: the other layers are a problem of their own
    with the budget that the groups leave. The fastest answer within the whole budget is taken.

The peak formula of `cost.memory` applies to groups. All that its halves recompute is held when its last half begins, and is freed
half by half, so each half counts the remaining bytes as its own:

    group of two          mlp(2)          attention(2)      mlp(1)       attention(1)
    [A] recomputed        a + b + c + d   a + b + c         a + b        a
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import ceil

from megatron_lynx.anatomy import HALVES
from megatron_lynx.errors import Infeasible
from megatron_lynx.solver.answer import Solved, Solver, layers_of
from megatron_lynx.solver.problem import Grouped, Mixed, Option, StageProblem

TRIED = 6
"""Number of ways that are solved if as many fit."""


@dataclass(frozen=True)
class Way:
    """A number of groups of one size; the last one may be smaller."""

    size: int
    count: int
    layers: int
    """In all groups together."""
    least_bytes: int
    """Lower bound of the peak. [1]"""

    @property
    def without_input(self) -> int:
        return self.layers - self.count


def fastest(problem: StageProblem, solver: Solver, least: Solved) -> Solved | None:
    """Return the fastest answer with groups within the budget, or None.

    solver: of the other layers.
    least: the answer without groups with the least peak.
    """
    if problem.budget_bytes is None or not problem.inside:
        return None
    groups, answers = _Groups(problem), list[Solved]()
    possible = [way for way in groups.ways if way.least_bytes <= problem.budget_bytes]
    possible.sort(key=lambda way: (way.without_input, way.size))
    picked = [possible[at * (len(possible) - 1) // (TRIED - 1)] for at in range(TRIED)] if len(possible) > TRIED else possible
    for way in dict.fromkeys([*picked, *sorted(possible, key=lambda way: way.least_bytes)]):
        if answers and way not in picked:
            break
        if (answer := groups.answer(way, solver, least)) is not None:
            answers.append(answer)
    return min(answers, key=lambda answer: (answer.longer_s, answer.peak_bytes), default=None)


def leaner(problem: StageProblem, least: Solved) -> Solved:
    """Return the answer with the least peak: `least`, or one with groups below the same other layers."""
    if not problem.inside:
        return least
    groups = _Groups(problem)
    ways = sorted(groups.ways, key=lambda way: way.least_bytes)[:TRIED]
    return min([least, *(groups.below(way, least.halves) for way in ways)], key=lambda answer: answer.peak_bytes)


@dataclass(frozen=True)
class _Groups:
    """All ways of one problem."""

    problem: StageProblem

    @cached_property
    def groupable_layers(self) -> int:
        """Number of lowest layers that can be in groups."""
        halves = zip(self.problem.halves, self.problem.inside, strict=False)  # `inside` may have more layers
        able = [bool(choices.joined) and inside is not None for choices, inside in halves]
        layers = [all(pair) for pair in zip(able[::2], able[1::2], strict=True)]
        return next((at for at, one in enumerate(layers) if not one), len(layers))

    @cached_property
    def ways(self) -> list[Way]:
        return [way for size in range(2, self.groupable_layers + 1) for way in self._of_size(size)]

    def _of_size(self, size: int) -> Iterator[Way]:
        most_bytes = 0
        for count in range(1, ceil(self.groupable_layers / size) + 1):
            begin, layers = (count - 1) * size, min(count * size, self.groupable_layers)
            below = self._kept[layers] + count * self._input_bytes
            most_bytes = max(most_bytes, below + self._made[layers] - self._made[begin])
            whole = below + self._kept_above[layers]
            least = (self.problem.in_flight - 1) * whole + max(most_bytes, whole + self.problem.loss_bytes)
            yield Way(size, count, layers, int(least))

    @cached_property
    def _kept(self) -> list[int]:
        """By number of lowest layers: least bytes kept if all of them are inside a group."""
        halves = (min(option.memory.resident for option in grouped) for grouped in self._grouped)
        return [0, *accumulate(map(sum, zip(halves, halves, strict=True)))]

    @cached_property
    def _made(self) -> list[int]:
        """By number of lowest layers: least bytes recomputed, less the workspace that a half does not need."""
        halves = (min(option.memory.regenerated - option.memory.less_in_hand for option in grouped) for grouped in self._grouped)
        return [0, *accumulate(map(sum, zip(halves, halves, strict=True)))]

    @cached_property
    def _kept_above(self) -> list[float]:
        """By number of lowest layers: least bytes that those above them keep."""
        least = [float(choices.columns.resident.min()) for choices in self.problem.halves]
        above = [0.0, *accumulate(sum(pair) for pair in zip(least[::-2], least[-2::-2], strict=True))]
        return above[::-1]

    @cached_property
    def _input_bytes(self) -> int:
        """Bytes that a group keeps in addition."""
        first = self._grouped[0]
        return first.edge.memory.resident - first.inside.memory.resident

    @cached_property
    def _grouped(self) -> list[Grouped]:
        """Each half that can be in a group."""
        halves = zip(self.problem.halves, self.problem.inside, strict=False)
        able = [grouped for choices, grouped in halves if choices.joined and grouped is not None]
        return able[: len(HALVES) * self.groupable_layers]

    def answer(self, way: Way, solver: Solver, least: Solved) -> Solved | None:
        """Return the groups below the solver's answer for the other layers, or below these with the least memory; None if that
        does not fit."""
        problem, budget_bytes, layers_above = self.problem, self.problem.budget_bytes, self.problem.layers - way.layers
        assert budget_bytes is not None
        leanest = self.below(way, least.halves)
        if not layers_above:
            return leanest if leanest.peak_bytes <= budget_bytes else None
        kept_bytes = ceil(problem.in_flight * sum(option.memory.resident for option in self._lowest(way)))
        left = replace(
            problem, layers=layers_above, mixed=self._above(way.layers), inside=(), budget_bytes=budget_bytes - kept_bytes
        )
        while True:
            try:
                answer = self.below(way, solver(left).halves)
            except Infeasible:
                return leanest if leanest.peak_bytes <= budget_bytes else None
            if (too_much := answer.peak_bytes - budget_bytes) <= 0:
                return answer
            left = replace(left, budget_bytes=(left.budget_bytes or 0) - too_much)  # what others keep while a group runs backward

    def below(self, way: Way, above: Sequence[Option]) -> Solved:
        """Return the groups below the last ones of these halves."""
        halves_above = len(HALVES) * (self.problem.layers - way.layers)
        layers = layers_of([*self._lowest(way), *above[len(above) - halves_above :]])
        return Solved(layers, self.problem.in_flight, loss_bytes=self.problem.loss_bytes)

    def _lowest(self, way: Way) -> Iterator[Option]:
        for begin in range(0, way.layers, way.size):
            yield from self._group(begin, min(begin + way.size, way.layers))

    def _above(self, layers: int) -> Mixed | None:
        mixed = self.problem.mixed
        return None if mixed is None else Mixed(mixed.halves[len(HALVES) * layers :])

    def _group(self, begin: int, end: int) -> Iterator[Option]:
        """Yield the halves of one group in forward order. A single layer is no group."""
        first, last, regenerated_bytes = len(HALVES) * begin, len(HALVES) * end - 1, 0
        options = [self._grouped[half][half not in (first, last)] for half in range(first, last + 1)]
        if end == begin + 1:
            yield from options
            return
        for option in options:
            memory = option.memory
            left = replace(
                memory,
                regenerated=memory.regenerated + regenerated_bytes,
                tail=memory.tail + regenerated_bytes,
                ahead=(0, 0, 0, 0),
            )
            regenerated_bytes += memory.regenerated
            yield replace(option, memory=left)
