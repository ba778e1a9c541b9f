r"""Solves a stage by a sweep over the price of a byte.

    exposed │ o               Of each kind of half, the options on the lower convex hull: the best ones at some price. As the
    price
    seconds │  \\              rises, all kinds move along their hulls, the cheapest step of any kind first. Bytes of a half are
            │    o ─ _        weighed in several ways (`WEIGHINGS`): as held while backward is elsewhere, or at its own moments.
            │          ─ o
            └────────────── bytes held

    layers of one stage     1 ... n-k-1     n-k ... n-1          n
    choice                      X               Y          any options of both halves

X and Y are neighbours on one hull, or the choices of two hulls at one price, so layers are of two sorts at most. The faster one
is usually below, where less is held when its backward runs. The last layer, where the peak is, is chosen separately. Checkpointed
layers are one more sort, which holds least. They are the lowest layers, because all of a layer is recomputed when those above are
finished. They lie on no half's hull; X is near the point where the line from them touches the hull of whole layers. All these
answers are priced, and the best is taken:

    with a budget     fastest backward, then least peak, then fewest resident bytes
    without one       all layers alike, no checkpoints, every recomputation in the window of its backward that hides most, because
                      leaving a window empty saves no memory: least peak, then fastest backward, then fewest resident bytes

The set of answers does not depend on the budget, so a larger budget never costs time. The peak (`cost.memory`) is a sum of the
bytes of the last layer and all others at the last layer's moments (five, with the one before backward begins). After these it
depends on the others alone. A table of all lower layers and all last layers is therefore cheap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, combinations, compress, cycle, pairwise
from math import floor, prod
from operator import is_
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.anatomy import HALVES
from megatron_lynx.cost.memory import COLUMNS, held_at_moments
from megatron_lynx.solver import groups
from megatron_lynx.solver.answer import Solved, infeasible, layers_of
from megatron_lynx.solver.problem import Choices, Columns, Floats, StageProblem, unbeaten
from megatron_lynx.units import SECOND_DIGITS

WEIGHINGS = (("held", 0.0), ("most", 0.5), ("most", 1.0), ("ends", 0.5), ("ends", 1.0), ("-1", 0.5), ("-1", 1.0))
"""How bytes of a half are weighed: the moment of its own (`cost.memory.COLUMNS`, or the largest one) and its weight. The rest of
the weight is on the bytes held before. Resident bytes of other micro-batches always count."""

NEIGHBOURS = 2
"""Largest distance in corners between two sorts of layers."""

MOST_ALIKE = 20_000
"""Ways with all layers alike that are considered for the least memory. Beyond that, only options that no other one beats in
seconds and two kinds of bytes, and of these every second one."""

MOST_ON_TOP = 24
"""The same for one half of the last layer."""

BATCH = 64
"""Ways of the lower layers that are combined with all last layers at once."""

MOST_BYTES = 10**100
"""Larger budgets are cut to this."""

ROUNDED_S = 1e-11
"""Largest change of seconds by rounding."""

RECENT = 2
"""Problems whose ways are remembered: chunks beside each other and the model's last one take turns."""

Numbers = NDArray[np.intp]
Corner = tuple[int, ...]
"""Number of the option of each kind of half."""


@dataclass(frozen=True)
class Sweeps:
    """`solve` for a series of problems: those that differ only in budget and loss share their ways."""

    recent: deque[_Ways] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __call__(self, problem: StageProblem) -> Solved:
        """Return the same as `solve`. Several layers keep one input only if nothing else fits."""
        if problem.budget_bytes is None:
            return least_memory(problem.plain.best_seated)
        sweep = _Sweep(problem, self.ways(problem))
        answer = sweep.fastest(float(min(problem.budget_bytes, MOST_BYTES)))
        if answer is None or answer.peak_bytes > problem.budget_bytes:  # beyond 2^53 bytes were rounded
            answer = sweep.leanest()
        if answer.peak_bytes <= problem.budget_bytes:
            return answer
        grouped = groups.fastest(problem, self, answer)
        if grouped is None:
            raise infeasible(problem, groups.leaner(problem, answer))
        return grouped

    def ways(self, problem: StageProblem) -> _Ways:
        """Return all ways of a problem's halves, the same object for recent problems."""
        ways_of_problem = next((ways for ways in self.recent if ways.are_of(problem)), None)
        if ways_of_problem is None:
            ways_of_problem = _Ways(problem.halves, problem.in_flight)
        else:
            self.recent.remove(ways_of_problem)
        self.recent.append(ways_of_problem)
        return ways_of_problem


def solve(problem: StageProblem) -> Solved:
    """Return the best answer. Raises `Infeasible` if the least memory exceeds the budget."""
    return Sweeps()(problem)


def least_memory(problem: StageProblem) -> Solved:
    """Return the answer with all layers alike and the least peak. Ties: see `solve` without a budget."""
    return _Sweep(problem, Sweeps().ways(problem)).leanest()


class _Part(NamedTuple):
    """Answers for some halves of a stage, one in a row."""

    chosen: Numbers
    """Numbers of options, in backward order."""
    longer_s: Floats
    resident: Floats
    held: Floats
    """At every moment, of one micro-batch."""


@dataclass(frozen=True)
class _Sweep:
    """One problem, and all its ways."""

    problem: StageProblem
    ways: _Ways

    def fastest(self, budget_bytes: float) -> Solved | None:
        """Return the fastest answer within the budget, or None."""
        if self._bound_bytes > budget_bytes:
            return None
        lower = self.ways.lower
        possible = np.flatnonzero(self._least_peaks(lower) <= budget_bytes)
        possible = possible[np.argsort(lower.longer_s[possible], kind="stable")]
        optimum: tuple[tuple[float, ...], int, int] | None = None
        for rows in np.split(possible, range(BATCH, len(possible), BATCH)):
            if not len(rows) or (optimum and lower.longer_s[rows[0]] + self._last.longer_s.min() > optimum[0][0] + ROUNDED_S):
                break
            seconds, peaks, resident = self._costs(lower, rows)
            best = _first(np.where(peaks <= budget_bytes, seconds, np.inf), peaks, resident)
            if peaks[best] <= budget_bytes and (optimum is None or (seconds[best], peaks[best], resident[best]) < optimum[0]):
                optimum = (seconds[best], peaks[best], resident[best]), rows[best[0]], best[1]
        return None if optimum is None else self._answer(lower, *optimum[1:])

    @property
    def _bound_bytes(self) -> float:
        """Lower bound of the bytes held when backward begins: every half takes the option with the fewest."""
        batches_beside, columns = self.problem.in_flight - 1, [choices.columns for choices in self.ways.backward]
        least = sum(
            float((batches_beside * half_columns.resident + half_columns.moments[:, 0]).min()) for half_columns in columns
        )
        return floor(self.problem.loss_bytes + least)

    def leanest(self) -> Solved:
        """Return the answer with the least peak of those with all layers alike."""
        lower = self.ways.lower_alike
        least = self._least_peaks(lower)
        ordered = np.argsort(least, kind="stable")
        optimum: tuple[tuple[float, ...], int, int] | None = None
        for rows in np.split(ordered, range(BATCH, len(ordered), BATCH)):
            if optimum and least[rows[0]] > optimum[0][0]:
                break
            seconds, peaks, resident = self._costs(lower, rows)
            best = _first(peaks, seconds, resident)
            if optimum is None or (peaks[best], seconds[best], resident[best]) < optimum[0]:
                optimum = (peaks[best], seconds[best], resident[best]), rows[best[0]], best[1]
        assert optimum is not None
        return self._answer(lower, *optimum[1:])

    def _answer(self, lower: _Part, row: int, last: int) -> Solved:
        numbers = [*self._last.chosen[last], *lower.chosen[row]]
        backward = [choices[number] for choices, number in zip(self.ways.backward, numbers, strict=True)]
        return Solved(layers_of(backward[::-1]), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)

    def _costs(self, lower: _Part, rows: Numbers) -> tuple[Floats, Floats, Floats]:
        """Return seconds, peaks and resident bytes: (rows of the lower layers, rows of the last layer)."""
        last, on_top = self._last, self._last.held.shape[-1]
        held = np.maximum(
            (lower.held[rows, None, :on_top] + last.held).max(axis=-1), lower.held[rows, on_top:].max(axis=-1, initial=0)[:, None]
        )
        resident = lower.resident[rows, None] + last.resident
        peaks = held + np.ceil((self.problem.in_flight - 1) * resident)
        return np.round(lower.longer_s[rows, None] + last.longer_s, SECOND_DIGITS), peaks, resident

    def _least_peaks(self, lower: _Part) -> Floats:
        """Return a lower bound of the peak of these lower layers with any last layer."""
        least = np.zeros(lower.held.shape[-1])
        least[: self._last.held.shape[-1]] = self._last.held.min(axis=0)
        beside_bytes = np.ceil((self.problem.in_flight - 1) * (lower.resident + self._last.resident.min()))
        return np.asarray((lower.held + least).max(axis=-1) + beside_bytes)

    @cached_property
    def _last(self) -> _Part:
        """Every way of the last layer, with the loss added before its backward begins."""
        last = self.ways.last
        held = last.held.copy()
        held[:, 0] += self.problem.loss_bytes
        return last._replace(held=held)


@dataclass(frozen=True, eq=False)
class _Ways:
    """All ways of the lower layers and of the last one, for any budget."""

    halves: tuple[Choices, ...]
    """Choices of every half, in forward order."""
    in_flight: float

    def are_of(self, problem: StageProblem) -> bool:
        """Whether these are the ways of a problem, compared by identity of its choices."""
        alike = self.in_flight == problem.in_flight and len(self.halves) == len(problem.halves)
        return alike and all(map(is_, self.halves, problem.halves))

    @cached_property
    def last(self) -> _Part:
        """All ways of the last layer."""
        offered = [self._worth_it(choices, MOST_ON_TOP) for choices in self.backward[: len(HALVES)]]
        chosen = np.stack([numbers.ravel() for numbers in np.meshgrid(*offered, indexing="ij")], axis=-1)
        whole = [[_joined(choices) for choices in self.backward[: len(HALVES)]]]
        return self._part(np.concatenate([chosen, np.array(whole)]) if None not in whole[0] else chosen, 0)

    @cached_property
    def lower(self) -> _Part:
        """All ways of the lower layers, alike or of two sorts."""
        return self._part(self._of_two_sorts, len(HALVES))

    @property
    def lower_alike(self) -> _Part:
        """All ways of the lower layers with all of them alike."""
        return self._part(self._alike, len(HALVES))

    def _part(self, chosen: Numbers, first: int) -> _Part:
        """Return these options of halves, from half `first` on in backward order."""
        every, halves = self._every_option, slice(first, first + chosen.shape[1])
        options = chosen + self._first_options[halves]
        columns = np.zeros((len(chosen), halves.stop, len(COLUMNS)))
        columns[:, halves] = every.moments[options]
        return _Part(chosen, every.longer_s[options].sum(axis=-1), every.resident[options].sum(axis=-1), held_at_moments(columns))

    @cached_property
    def _every_option(self) -> Columns:
        """Options of all kinds of halves, concatenated."""
        kinds = {id(choices): choices.columns for choices in self.backward}
        return Columns(*(np.concatenate(costs) for costs in zip(*kinds.values(), strict=True)))

    @cached_property
    def _first_options(self) -> Numbers:
        """Index of each half's first option in these."""
        kinds = {id(choices): len(choices) for choices in self.backward}
        begins = dict(zip(kinds, accumulate(kinds.values(), initial=0), strict=False))
        return np.array([begins[id(choices)] for choices in self.backward], dtype=np.intp)

    @property
    def _of_two_sorts(self) -> Numbers:
        """Options of the lower layers' halves with layers alike or of two sorts; one way in a row."""
        pairs = np.array(list(dict.fromkeys(self._pairs)), dtype=np.intp)
        below, above = pairs[:, 0, self._kind_of_half], pairs[:, 1, self._kind_of_half]
        alike, halves = (pairs[:, 0] == pairs[:, 1]).all(axis=-1), below.shape[1]
        counts = np.arange(1, halves // len(HALVES))[:, None] * len(HALVES)
        mixed = np.where(np.arange(halves) < counts, above[~alike, None], below[~alike, None])
        return np.concatenate([below[alike], mixed.reshape(mixed.shape[0] * mixed.shape[1], halves)])

    @property
    def _pairs(self) -> Iterator[tuple[Corner, Corner]]:
        """Yield the options of the lower layers, and of those above them. [X, Y]"""
        lines = [self._corners(*weighing) for weighing in WEIGHINGS]
        for corners, _ in lines:
            for apart in range(NEIGHBOURS + 1):
                yield from zip(corners, corners[apart:], strict=False)
        for (corners, _), weighing in zip(lines, WEIGHINGS, strict=True):
            yield from self._with_checkpoints(corners, *weighing)
        (corners, prices), *later_lines = lines
        for more, later in later_lines:
            every = sorted({*prices, *later})
            at, beside = (np.searchsorted(line_prices, every, "right") - 1 for line_prices in (prices, later))
            yield from ((corners[place], more[other]) for place, other in zip(at.tolist(), beside.tolist(), strict=True))

    def _with_checkpoints(self, corners: Sequence[Corner], moment: str, part: float) -> Iterator[tuple[Corner, Corner]]:
        """Yield corners above checkpointed layers: the one from which the price of a byte is lowest, and its neighbours."""
        weighed = [self._weighed(choices, moment, part) for choices in self._kinds]
        for layers in self._checkpointable:
            replaced = {kind: len(self._kinds[kind]) - 1 for layer in layers for kind in layer}
            totals = [
                (
                    sum(float(self._kinds[kind].columns.longer_s[corner[kind]]) for layer in layers for kind in layer),
                    sum(float(weighed[kind][corner[kind]]) for layer in layers for kind in layer),
                )
                for corner in (*corners, tuple(replaced.get(kind, 0) for kind in range(len(self._kinds))))
            ]
            *whole, (longer_s, held) = totals
            prices = [(longer_s - seconds) / (size - held) if size > held else np.inf for seconds, size in whole]
            best = int(np.argmin(prices))
            for corner in corners[max(0, best - NEIGHBOURS) : best + NEIGHBOURS + 1]:
                below = tuple(replaced.get(kind, number) for kind, number in enumerate(corner))
                yield below, corner
                yield below, below

    @cached_property
    def _checkpointable(self) -> list[tuple[tuple[int, ...], ...]]:
        """Sets of kinds of lower layers that can be checkpointed, each given by the kinds of its halves."""
        of_layers = map(tuple, self._kind_of_half.reshape(-1, len(HALVES)).tolist())
        layers = [layer for layer in dict.fromkeys(of_layers) if self._may_join(layer)]
        return [chosen for count in range(1, len(layers) + 1) for chosen in combinations(layers, count)]

    def _may_join(self, layer: tuple[int, ...]) -> bool:
        return all(self._kinds[kind].joined for kind in layer)

    def _weighed(self, choices: Choices, moment: str, part: float) -> Floats:
        """Return the weighed bytes of a kind's options."""
        columns = choices.columns
        moment_bytes = columns.moments.max(axis=-1) if moment == "most" else columns.moments[:, COLUMNS.index(moment)]
        return np.asarray((self.in_flight - 1) * columns.resident + (1 - part) * columns.moments[:, 0] + part * moment_bytes)

    def _corners(self, moment: str, part: float) -> tuple[list[Corner], list[float]]:
        """Return the options of all kinds at rising prices, and the price from which each applies."""
        lines = [self._line(choices, moment, part) for choices in self._kinds]
        steps = sorted((price, place, kind) for kind, (_, prices) in enumerate(lines) for place, price in enumerate(prices))
        corners, prices = [tuple(line[0] for line, _ in lines)], [-np.inf]
        for price, place, kind in steps:
            behind = lines[kind][0][place + 1]
            corners.append((*corners[-1][:kind], behind, *corners[-1][kind + 1 :]))
            prices.append(price)
        return corners, prices

    def _line(self, choices: Choices, moment: str, part: float) -> tuple[list[int], list[float]]:
        """Return the corners of one kind, from its fastest option to the one that holds least, and the price of each step. Ties
        go to the fewest bytes at the other moments."""
        apart = slice(len(choices) - len(choices.joined))
        columns, weighed = choices.columns.at(apart), self._weighed(choices, moment, part)[apart]
        held, most_bytes = columns.moments[:, 0], columns.moments.max(axis=-1)
        ordered = np.lexsort((held if part else most_bytes, weighed, columns.longer_s))
        leaner = np.append(True, weighed[ordered][1:] < np.minimum.accumulate(weighed[ordered])[:-1])
        points = [(int(row), float(columns.longer_s[row]), float(weighed[row])) for row in ordered[leaner]]
        corners: list[tuple[int, float, float]] = []
        for point in points:
            while len(corners) > 1 and _price(corners[-2], point) <= _price(corners[-2], corners[-1]):
                corners.pop()
            corners.append(point)
        return [number for number, *_ in corners], [_price(*pair) for pair in pairwise(corners)]

    @property
    def _alike(self) -> Numbers:
        """Options of the lower layers' halves with all layers alike; one way in a row."""
        offered = [np.arange(len(choices) - len(choices.joined)) for choices in self._kinds]
        if prod(map(len, offered)) > MOST_ALIKE:
            offered = [self._worth_it(choices, 0) for choices in self._kinds]
        while prod(map(len, offered)) > MOST_ALIKE:
            longest = max(range(len(offered)), key=lambda kind: len(offered[kind]))
            offered[longest] = _every_second(self._kinds[longest], offered[longest])
        if not offered:
            return np.zeros((1, 0), dtype=np.intp)
        ways = np.stack([numbers.ravel() for numbers in np.meshgrid(*offered, indexing="ij")], axis=-1)
        if self._checkpointable:
            whole = {kind for layer in self._checkpointable[-1] for kind in layer}
            leanest = [_joined(choices) if kind in whole else None for kind, choices in enumerate(self._kinds)]
            leanest_apart = [int(choices.apart.columns.resident.argmin()) for choices in self._kinds]
            rows = [
                [number_apart if number is None else number for number, number_apart in zip(leanest, leanest_apart, strict=True)]
            ]
            ways = np.append(ways, rows, axis=0)
        return ways[:, self._kind_of_half]

    def _worth_it(self, choices: Choices, limit: int) -> Numbers:
        """Return all options of a kind if they are at most `limit`, otherwise those that no other one beats in seconds and in
        bytes: its bytes while backward is elsewhere, and at its largest moment."""
        apart = len(choices) - len(choices.joined)
        if apart <= limit:
            return np.arange(apart)
        columns = choices.columns.at(slice(apart))
        beside_bytes = (self.in_flight - 1) * columns.resident
        return unbeaten((columns.longer_s, beside_bytes + columns.moments[:, 0], beside_bytes + columns.moments.max(axis=-1)))

    @cached_property
    def backward(self) -> list[Choices]:
        """Options of every half that no other one beats, in backward order. Those of whole layers come last."""
        return [choices.unbeaten for choices in self.halves[::-1]]

    @cached_property
    def _kinds(self) -> list[Choices]:
        """Kinds of the lower layers' halves by identity: equal kinds may have windows in other places."""
        return list({id(choices): choices for choices in self.backward[len(HALVES) :]}.values())

    @cached_property
    def _kind_of_half(self) -> Numbers:
        known = {id(choices): number for number, choices in enumerate(self._kinds)}
        return np.array([known[id(choices)] for choices in self.backward[len(HALVES) :]], dtype=np.intp)


def _price(faster: tuple[int, float, float], leaner: tuple[int, float, float]) -> float:
    """Return seconds for a byte."""
    return (leaner[1] - faster[1]) / (faster[2] - leaner[2])


def _joined(choices: Choices) -> int | None:
    """Return the number of the option of a checkpointed layer, or None."""
    return len(choices) - 1 if choices.joined else None


def _first(*costs: Floats) -> tuple[int, int]:
    """Return the position with the least first cost; ties go to the next cost, and so on."""
    chosen = np.arange(costs[0].size)
    for cost in costs:
        values = cost.ravel()[chosen]
        chosen = chosen[values == values.min()]
    row, column = divmod(int(chosen[0]), costs[0].shape[1])
    return row, column


def _every_second(choices: Choices, numbers: Sequence[int] | Numbers) -> Numbers:
    """Return every second one, from the one that holds least to the fastest of those that keep most, both included."""
    ordered = sorted(numbers, key=lambda number: (choices[number].memory.resident, -choices[number].longer_s))
    return np.array([*compress(ordered[:-1], cycle((True, False))), ordered[-1]], dtype=np.intp)
