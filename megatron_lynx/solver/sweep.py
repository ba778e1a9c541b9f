"""Solves a stage by a sweep over the price of a byte: what each half does if a byte is worth so many seconds.

    exposed │ o               Of each kind of half the options that some price makes the best one: the corners of the line
    seconds │  \\              below which no option lies. As the price rises, all kinds go down their lines, one corner after
            │    o ─ _        the other, the cheapest step of any kind first. How a half's bytes are weighed, decides which
            │          ─ o    line it is (`WEIGHINGS`): as it holds them while backward is elsewhere, or at its own moments.
            └────────────── bytes held

    layers of one stage     1 ... n-k-1     n-k ... n-1          n
    choice                      X               Y          any options of both halves

X and Y are neighbours on one line, or what two lines say at one price: so layers are of two sorts at most, the faster one below
as a rule, where less is held when its backward runs. The last layer, at which most is held, is chosen apart. Checkpointed layers
are one more sort, which holds least: the lowest layers, because all of one is there at once when those above are over. Their
point is on no half's line, but where a straight line from it touches that of whole layers, X is about there. Every such answer
is priced, and the best one taken:

    with a budget     fastest backward, then least peak, then fewest resident bytes
    without one       all layers alike, nothing checkpointed, and every replay in the window of its backward that hides most of
                      it, because leaving a window empty saves no memory: least peak, then fastest backward, then fewest
                      resident bytes

Which answers these are does not depend on the budget, so more of it never costs time. The peak of an answer is a sum, as
`cost.memory` has it, of what the last layer and all others hold at the moments of the last layer (five, with the one before
backward begins); behind these it is that of the others alone. So a table of all lower layers and all last ones is cheap.
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
"""How bytes of a half are weighed: at which of its own moments (`cost.memory.COLUMNS`, or the one at which most is there), and
which part of the weight these have. The other part has what it holds before. Resident bytes of other micro-batches count in any
case."""

NEIGHBOURS = 2
"""So many corners apart two sorts of layers are at most."""

MOST_ALIKE = 20_000
"""So many ways in which all layers are alike are looked at for the least memory, and beyond them only options that are not beaten
in seconds and in two kinds of bytes, and of these every second one."""

MOST_ON_TOP = 24
"""The same of one half of the last layer."""

BATCH = 64
"""Ways of the lower layers that are put together with all last ones at once."""

MOST_BYTES = 10**100
"""Larger budgets are cut to this one."""

ROUNDED_S = 1e-11
"""Rounding seconds changes them by less than this."""

RECENT = 2
"""The ways of so many problems are remembered: chunks beside each other and the model's last one take turns."""

Numbers = NDArray[np.intp]
Corner = tuple[int, ...]
"""By kind of half the number of its option."""


@dataclass(frozen=True)
class Sweeps:
    """`solve` for problem after problem: those that differ in their budget and in the loss alone have their ways in common."""

    recent: deque[_Ways] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __call__(self, problem: StageProblem) -> Solved:
        """As `solve` has it. Several layers keep one input only where nothing else fits."""
        if problem.budget_bytes is None:
            return least_memory(problem.plain.best_seated)
        sweep = _Sweep(problem, self.ways(problem))
        answer = sweep.fastest(float(min(problem.budget_bytes, MOST_BYTES)))
        if answer is None or answer.peak_bytes > problem.budget_bytes:  # what is beyond 2^53 bytes was rounded
            answer = sweep.leanest()
        if answer.peak_bytes <= problem.budget_bytes:
            return answer
        grouped = groups.fastest(problem, self, answer)
        if grouped is None:
            raise infeasible(problem, groups.leaner(problem, answer))
        return grouped

    def ways(self, problem: StageProblem) -> _Ways:
        """All ways of a problem's halves, the same ones if they were asked for just before."""
        found = next((ways for ways in self.recent if ways.are_of(problem)), None)
        if found is None:
            found = _Ways(problem.halves, problem.in_flight)
        else:
            self.recent.remove(found)
        self.recent.append(found)
        return found


def solve(problem: StageProblem) -> Solved:
    """The best answer. Raises `Infeasible` when not even the least memory fits the budget."""
    return Sweeps()(problem)


def least_memory(problem: StageProblem) -> Solved:
    """The answer with all layers alike that has the least peak, whatever it exposes. Ties: as without a budget."""
    return _Sweep(problem, Sweeps().ways(problem)).leanest()


class _Part(NamedTuple):
    """Answers for some halves of a stage, a row each."""

    chosen: Numbers
    """Numbers of options, in the order of a backward."""
    longer_s: Floats
    resident: Floats
    held: Floats
    """At every moment, of one micro-batch."""


@dataclass(frozen=True)
class _Sweep:
    """One problem, and all ways to answer it that are looked at."""

    problem: StageProblem
    ways: _Ways

    def fastest(self, budget_bytes: float) -> Solved | None:
        """The fastest that keeps the budget, if any does."""
        if self._bound_bytes > budget_bytes:
            return None
        lower = self.ways.lower
        possible = np.flatnonzero(self._least_peaks(lower) <= budget_bytes)
        possible = possible[np.argsort(lower.longer_s[possible], kind="stable")]
        found: tuple[tuple[float, ...], int, int] | None = None
        for rows in np.split(possible, range(BATCH, len(possible), BATCH)):
            if not len(rows) or (found and lower.longer_s[rows[0]] + self._last.longer_s.min() > found[0][0] + ROUNDED_S):
                break
            seconds, peaks, resident = self._costs(lower, rows)
            best = _first(np.where(peaks <= budget_bytes, seconds, np.inf), peaks, resident)
            if peaks[best] <= budget_bytes and (found is None or (seconds[best], peaks[best], resident[best]) < found[0]):
                found = (seconds[best], peaks[best], resident[best]), rows[best[0]], best[1]
        return None if found is None else self._answer(lower, *found[1:])

    @property
    def _bound_bytes(self) -> float:
        """No answer holds less when backward begins: every half does what then holds least."""
        others, columns = self.problem.in_flight - 1, [choices.columns for choices in self.ways.backward]
        least = sum(float((others * each.resident + each.moments[:, 0]).min()) for each in columns)
        return floor(self.problem.loss_bytes + least)

    def leanest(self) -> Solved:
        """The one that holds least, of those whose layers are alike."""
        lower = self.ways.lower_alike
        least = self._least_peaks(lower)
        ordered = np.argsort(least, kind="stable")
        found: tuple[tuple[float, ...], int, int] | None = None
        for rows in np.split(ordered, range(BATCH, len(ordered), BATCH)):
            if found and least[rows[0]] > found[0][0]:
                break
            seconds, peaks, resident = self._costs(lower, rows)
            best = _first(peaks, seconds, resident)
            if found is None or (peaks[best], seconds[best], resident[best]) < found[0]:
                found = (peaks[best], seconds[best], resident[best]), rows[best[0]], best[1]
        assert found is not None
        return self._answer(lower, *found[1:])

    def _answer(self, lower: _Part, row: int, last: int) -> Solved:
        numbers = [*self._last.chosen[last], *lower.chosen[row]]
        backward = [choices[number] for choices, number in zip(self.ways.backward, numbers, strict=True)]
        return Solved(layers_of(backward[::-1]), self.problem.in_flight, loss_bytes=self.problem.loss_bytes)

    def _costs(self, lower: _Part, rows: Numbers) -> tuple[Floats, Floats, Floats]:
        """Seconds, peaks and resident bytes: (rows of the lower layers, rows of the last one)."""
        last, on_top = self._last, self._last.held.shape[-1]
        held = np.maximum(
            (lower.held[rows, None, :on_top] + last.held).max(axis=-1), lower.held[rows, on_top:].max(axis=-1, initial=0)[:, None]
        )
        resident = lower.resident[rows, None] + last.resident
        peaks = held + np.ceil((self.problem.in_flight - 1) * resident)
        return np.round(lower.longer_s[rows, None] + last.longer_s, SECOND_DIGITS), peaks, resident

    def _least_peaks(self, lower: _Part) -> Floats:
        """No last layer makes the peak of these lower ones less than this."""
        least = np.zeros(lower.held.shape[-1])
        least[: self._last.held.shape[-1]] = self._last.held.min(axis=0)
        others = np.ceil((self.problem.in_flight - 1) * (lower.resident + self._last.resident.min()))
        return np.asarray((lower.held + least).max(axis=-1) + others)

    @cached_property
    def _last(self) -> _Part:
        """Every way of the last layer, beside which there is the loss before its backward begins."""
        last = self.ways.last
        held = last.held.copy()
        held[:, 0] += self.problem.loss_bytes
        return last._replace(held=held)


@dataclass(frozen=True, eq=False)
class _Ways:
    """Each way of the lower layers, and each of the last one, whatever the budget."""

    halves: tuple[Choices, ...]
    """The choices of every half, in forward order."""
    in_flight: float

    def are_of(self, problem: StageProblem) -> bool:
        """Whether they are those of a problem: of the very same choices, which takes no time to see."""
        alike = self.in_flight == problem.in_flight and len(self.halves) == len(problem.halves)
        return alike and all(map(is_, self.halves, problem.halves))

    @cached_property
    def last(self) -> _Part:
        """Every way of the last layer."""
        offered = [self._worth_it(choices, MOST_ON_TOP) for choices in self.backward[: len(HALVES)]]
        chosen = np.stack([numbers.ravel() for numbers in np.meshgrid(*offered, indexing="ij")], axis=-1)
        whole = [[_joined(choices) for choices in self.backward[: len(HALVES)]]]
        return self._part(np.concatenate([chosen, np.array(whole)]) if None not in whole[0] else chosen, 0)

    @cached_property
    def lower(self) -> _Part:
        """Every way of the lower layers, alike or of two sorts."""
        return self._part(self._of_two_sorts, len(HALVES))

    @property
    def lower_alike(self) -> _Part:
        """Every way of the lower layers in which all are alike."""
        return self._part(self._alike, len(HALVES))

    def _part(self, chosen: Numbers, first: int) -> _Part:
        """These options of halves, from the first one of these in the order of a backward on."""
        every, halves = self._every_option, slice(first, first + chosen.shape[1])
        options = chosen + self._first_options[halves]
        columns = np.zeros((len(chosen), halves.stop, len(COLUMNS)))
        columns[:, halves] = every.moments[options]
        return _Part(chosen, every.longer_s[options].sum(axis=-1), every.resident[options].sum(axis=-1), held_at_moments(columns))

    @cached_property
    def _every_option(self) -> Columns:
        """The options of all kinds of halves, one kind behind the other."""
        kinds = {id(choices): choices.columns for choices in self.backward}
        return Columns(*(np.concatenate(costs) for costs in zip(*kinds.values(), strict=True)))

    @cached_property
    def _first_options(self) -> Numbers:
        """Where in these the options of each half begin."""
        kinds = {id(choices): len(choices) for choices in self.backward}
        begins = dict(zip(kinds, accumulate(kinds.values(), initial=0), strict=False))
        return np.array([begins[id(choices)] for choices in self.backward], dtype=np.intp)

    @property
    def _of_two_sorts(self) -> Numbers:
        """Options of the lower layers' halves, where layers are alike or of two sorts; a row for each."""
        pairs = np.array(list(dict.fromkeys(self._pairs)), dtype=np.intp)
        below, above = pairs[:, 0, self._kind_of_half], pairs[:, 1, self._kind_of_half]
        alike, halves = (pairs[:, 0] == pairs[:, 1]).all(axis=-1), below.shape[1]
        counts = np.arange(1, halves // len(HALVES))[:, None] * len(HALVES)
        mixed = np.where(np.arange(halves) < counts, above[~alike, None], below[~alike, None])
        return np.concatenate([below[alike], mixed.reshape(mixed.shape[0] * mixed.shape[1], halves)])

    @property
    def _pairs(self) -> Iterator[tuple[Corner, Corner]]:
        """What lower layers do, and what those above them do. [X, Y]"""
        lines = [self._corners(*weighing) for weighing in WEIGHINGS]
        for corners, _ in lines:
            for apart in range(NEIGHBOURS + 1):
                yield from zip(corners, corners[apart:], strict=False)
        for (corners, _), weighing in zip(lines, WEIGHINGS, strict=True):
            yield from self._with_checkpoints(corners, *weighing)
        (corners, prices), *others = lines
        for more, later in others:
            every = sorted({*prices, *later})
            at, beside = (np.searchsorted(each, every, "right") - 1 for each in (prices, later))
            yield from ((corners[own], more[other]) for own, other in zip(at.tolist(), beside.tolist(), strict=True))

    def _with_checkpoints(self, corners: Sequence[Corner], moment: str, part: float) -> Iterator[tuple[Corner, Corner]]:
        """Corners below which layers are checkpointed: the one from which a byte is dearest to gain so, and its neighbours."""
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
                below = tuple(replaced.get(kind, own) for kind, own in enumerate(corner))
                yield below, corner
                yield below, below

    @cached_property
    def _checkpointable(self) -> list[tuple[tuple[int, ...], ...]]:
        """Sets of kinds of lower layers, of which all can be checkpointed: each by the kinds of its halves."""
        of_layers = map(tuple, self._kind_of_half.reshape(-1, len(HALVES)).tolist())
        layers = [layer for layer in dict.fromkeys(of_layers) if self._may_join(layer)]
        return [chosen for count in range(1, len(layers) + 1) for chosen in combinations(layers, count)]

    def _may_join(self, layer: tuple[int, ...]) -> bool:
        return all(self._kinds[kind].joined for kind in layer)

    def _weighed(self, choices: Choices, moment: str, part: float) -> Floats:
        """What options of a kind hold, as a line weighs it."""
        columns = choices.columns
        own = columns.moments.max(axis=-1) if moment == "most" else columns.moments[:, COLUMNS.index(moment)]
        return np.asarray((self.in_flight - 1) * columns.resident + (1 - part) * columns.moments[:, 0] + part * own)

    def _corners(self, moment: str, part: float) -> tuple[list[Corner], list[float]]:
        """Options of all kinds at rising prices, and from which price on."""
        lines = [self._line(choices, moment, part) for choices in self._kinds]
        steps = sorted((price, place, kind) for kind, (_, prices) in enumerate(lines) for place, price in enumerate(prices))
        corners, prices = [tuple(line[0] for line, _ in lines)], [-np.inf]
        for price, place, kind in steps:
            behind = lines[kind][0][place + 1]
            corners.append((*corners[-1][:kind], behind, *corners[-1][kind + 1 :]))
            prices.append(price)
        return corners, prices

    def _line(self, choices: Choices, moment: str, part: float) -> tuple[list[int], list[float]]:
        """The corners of one kind, from its fastest option to the one that holds least, and the price of each step. Of equals the
        one that holds least at the other moments."""
        apart = slice(len(choices) - len(choices.joined))
        columns, weighed = choices.columns.at(apart), self._weighed(choices, moment, part)[apart]
        held, most = columns.moments[:, 0], columns.moments.max(axis=-1)
        ordered = np.lexsort((held if part else most, weighed, columns.longer_s))
        leaner = np.append(True, weighed[ordered][1:] < np.minimum.accumulate(weighed[ordered])[:-1])
        points = [(int(each), float(columns.longer_s[each]), float(weighed[each])) for each in ordered[leaner]]
        corners: list[tuple[int, float, float]] = []
        for point in points:
            while len(corners) > 1 and _price(corners[-2], point) <= _price(corners[-2], corners[-1]):
                corners.pop()
            corners.append(point)
        return [number for number, *_ in corners], [_price(*both) for both in pairwise(corners)]

    @property
    def _alike(self) -> Numbers:
        """Options of the lower layers' halves, where all layers are alike; a row for each."""
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
            others = [int(choices.apart.columns.resident.argmin()) for choices in self._kinds]
            rows = [[own if number is None else number for number, own in zip(leanest, others, strict=True)]]
            ways = np.append(ways, rows, axis=0)
        return ways[:, self._kind_of_half]

    def _worth_it(self, choices: Choices, most: int) -> Numbers:
        """The options of a kind, or where they are more than so many, those that no other one beats in seconds and in bytes: what
        a half holds while backward is elsewhere, and as if it were the one with the peak."""
        apart = len(choices) - len(choices.joined)
        if apart <= most:
            return np.arange(apart)
        columns = choices.columns.at(slice(apart))
        others = (self.in_flight - 1) * columns.resident
        return unbeaten((columns.longer_s, others + columns.moments[:, 0], others + columns.moments.max(axis=-1)))

    @cached_property
    def backward(self) -> list[Choices]:
        """The options of every half that no other one beats, in the order of a backward. Those of whole layers come last."""
        return [choices.unbeaten for choices in self.halves[::-1]]

    @cached_property
    def _kinds(self) -> list[Choices]:
        """The kinds of the lower layers' halves, told apart by identity: options of kinds that are alike have windows in other
        places."""
        return list({id(choices): choices for choices in self.backward[len(HALVES) :]}.values())

    @cached_property
    def _kind_of_half(self) -> Numbers:
        known = {id(choices): number for number, choices in enumerate(self._kinds)}
        return np.array([known[id(choices)] for choices in self.backward[len(HALVES) :]], dtype=np.intp)


def _price(faster: tuple[int, float, float], leaner: tuple[int, float, float]) -> float:
    """Seconds for a byte."""
    return (leaner[1] - faster[1]) / (faster[2] - leaner[2])


def _joined(choices: Choices) -> int | None:
    """Which of them is a half of a layer that is checkpointed, if any is."""
    return len(choices) - 1 if choices.joined else None


def _first(*costs: Floats) -> tuple[int, int]:
    """Where a table of costs is least in the first one, among these in the next, and so on."""
    chosen = np.arange(costs[0].size)
    for cost in costs:
        values = cost.ravel()[chosen]
        chosen = chosen[values == values.min()]
    row, column = divmod(int(chosen[0]), costs[0].shape[1])
    return row, column


def _every_second(choices: Choices, numbers: Sequence[int] | Numbers) -> Numbers:
    """Half of them, from the one that holds least to the fastest of those that keep most, both of these included."""
    ordered = sorted(numbers, key=lambda number: (choices[number].memory.resident, -choices[number].longer_s))
    return np.array([*compress(ordered[:-1], cycle((True, False))), ordered[-1]], dtype=np.intp)
