"""Solves a stage: how many layers of each kind get each column, for the fastest micro-batch within the budget (docs/planner.md).

A column is an option for each half of a layer, checkpoints included, that no other column beats. Of adjacent layers of one kind,
the one with the larger need beyond its resident bytes is lower, where the layers above it are finished. Host seconds are counted
only if the fastest answer without them is late.

[1] At a price for a byte every layer chooses alone. As the price rises, each kind of layer moves down the lower convex hull of
    its columns, layer after layer. Each of these answers is evaluated with every column of the last layer.
[2] From the fastest that fits: 1, 2, 4 ... or all layers of one column change to another one, or two layers change at once, while
    that is faster and fits, or as fast and holds less.
[3] If none fits, the lowest layers share inputs in groups of every size and number.

Peaks are exact, so no answer exceeds its budget. No time limit or tolerance affects the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import accumulate, chain, pairwise, product, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.anatomy import HALVES, by_layer
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.once import once
from megatron_lynx.solver.answer import Solved, infeasible
from megatron_lynx.solver.problem import Choices, Floats, Grouped, Option, StageProblem, unbeaten
from megatron_lynx.units import SECOND_DIGITS

MOST_PAIRS = 300
"""Changes of two layers that are evaluated, the fastest first [2]. With 30, steps of 22 ready jobs are 0.06 % longer in the mean
and 1.3 % at worst; with 3,000, 0.04 % shorter at best."""

Numbers = NDArray[np.intp]
LayerOptions = tuple[Option, Option]
Inside = tuple[Grouped | None, ...]


class Table(NamedTuple):
    """Columns are treatments of one kind of layer. Bytes are for one micro-batch."""

    halves: tuple[LayerOptions, ...]
    longer_s: Floats
    resident: Floats
    whole: Floats
    """(columns, 4): when the MLP half's backward begins and ends, then the attention half's."""
    ahead: Floats
    """(columns, 4): bytes beyond `resident` at these moments of the layer above."""
    host_s: Floats
    """(columns, 2): forward and backward."""

    @property
    def need(self) -> Floats:
        """Bytes beyond `resident` at the layer's own moments if the next layer has the same treatment."""
        return np.asarray((self.whole + self.ahead).max(axis=1) - self.resident)

    def at(self, numbers: Sequence[int] | Numbers) -> Table:
        return Table(tuple(self.halves[number] for number in numbers), *(part[numbers] for part in self[1:]))

    @classmethod
    def of(cls, tables: Iterable[Table]) -> Table:
        halves, *parts = zip(*tables, strict=True)
        return cls(tuple(chain.from_iterable(halves)), *map(np.concatenate, parts))


def _columns(attention: Choices, mlp: Choices, pairs: Sequence[tuple[int, int]]) -> Table:
    """`pairs`: numbers of both halves' options."""
    numbers = np.array(pairs, dtype=np.intp).reshape(-1, len(HALVES))
    first, second = (half.costs[of_half] for half, of_half in zip((attention, mlp), numbers.T, strict=True))
    x, y = first[:, 3:], second[:, 3:]
    return Table(
        tuple((attention[one], mlp[other]) for one, other in pairs),
        np.round(first[:, 0] + second[:, 0], SECOND_DIGITS),
        x[:, 0] + y[:, 0],
        np.stack([y[:, 5] + x[:, 3], y[:, 6] + x[:, 4], x[:, 5], x[:, 6]], axis=1),
        np.stack([y[:, 1], y[:, 2], y[:, 3] + x[:, 1] - x[:, 0], y[:, 4] + x[:, 2] - x[:, 0]], axis=1) - y[:, :1],
        first[:, 1:3] + second[:, 1:3],
    )


class Answer(NamedTuple):
    """A column for each lower layer, first to last, and one for the last layer."""

    costs: tuple[float, float]
    """Seconds, then the peak in bytes; if the least memory is sought, bytes first."""
    lower: Numbers
    last: int


@dataclass(frozen=True)
class Programme:
    """Solver of a series of problems. Each is solved once, and kinds of layers share tables."""

    def __call__(self, problem: StageProblem) -> Solved:
        """Return the fastest answer that fits; without a budget, that fits where everything is recomputed, in waits if possible.
        Raises `Infeasible`."""
        if problem.budget_bytes is None:
            leanest = (min(half.plain, key=lambda option: (option.memory.resident, option.longer_s)) for half in problem.halves)
            problem = replace(problem, budget_bytes=_solved(problem, leanest).peak_bytes, device=None)
        if (found := self._fastest(replace(problem, stage=0, forward_s=0.0))) is None:
            raise infeasible(problem, self.least(problem))
        return found

    def least(self, problem: StageProblem) -> Solved:
        """Return the answer with the least peak, whatever the budget."""
        return self._least(replace(problem, stage=0, forward_s=0.0, budget_bytes=None, device=None))

    @once
    def _fastest(self, problem: StageProblem) -> Solved | None:
        assert problem.budget_bytes is not None
        if problem.device is not None:
            answer = self._fastest(replace(problem, device=None))
            if answer is None:
                return None
            host = sum((half.host for half in answer.halves), start=NO_HOST_TIME)
            if not host.beyond(problem.device.forward_s, problem.device.backward_s + answer.longer_s):
                return answer
        for found in self._found(problem, float(problem.budget_bytes)):
            if found.peak_bytes <= problem.budget_bytes:
                return found
        least = self.least(problem)
        return least if least.peak_bytes <= problem.budget_bytes else None  # peaks beyond 2^53 bytes are rounded

    @once
    def _least(self, problem: StageProblem) -> Solved:
        return min(self._found(problem, None), key=lambda answer: answer.peak_bytes)

    def _found(self, problem: StageProblem, budget_bytes: float | None) -> Iterator[Solved]:
        """Yield the best answer without groups of layers, then with groups of the lowest, then those with all layers in
        groups."""
        if not problem.layers:
            yield _solved(problem, [])
            return
        layers = partial(self._layers, problem.halves, hosted=problem.device is not None, leaving=problem.leaving)
        yield from _Stage(problem, layers(())).best(budget_bytes)
        columns, ways = self._ways(problem.halves, problem.inside)
        everywhere = ways[:, -1] >= 0
        if not everywhere.all():
            yield from _Stage(problem, layers(problem.inside)).best(budget_bytes)
        answers = [_solved(problem, chain(*(columns.halves[number] for number in way))) for way in ways[everywhere].tolist()]
        yield from sorted(answers, key=lambda answer: answer.longer_s)

    @once
    def _layers(self, halves: tuple[Choices, ...], inside: Inside, *, hosted: bool, leaving: bool) -> _Layers:
        """`inside`: empty if no layers are in groups, else with every way that leaves some out."""
        *lower, last = by_layer(halves)
        kinds = {both: number for number, both in enumerate(dict.fromkeys(lower))}
        tables = [self._table(*both, last=False, hosted=hosted) for both in kinds]
        begins = list(accumulate((len(each.resident) for each in tables), initial=0))
        grouped, ways = self._ways(halves, inside)
        ways = ways[ways[:, -1] < 0, :-1] if inside else np.full((1, len(lower)), -1)
        return _Layers(
            np.array([kinds[both] for both in lower], dtype=np.intp),
            list(pairwise(begins)),
            Table.of([*tables, grouped]),
            self._table(*last, last=True, hosted=hosted),
            np.where(ways < 0, ways, ways + begins[-1]),
            hosted,
            leaving,
        )

    @once
    def _table(self, attention: Choices, mlp: Choices, *, last: bool, hosted: bool) -> Table:
        """Return the columns of a kind of layer that no other one beats. `last`: of the stage's last layer. `hosted`: with host
        seconds."""
        first, second = attention.unbeaten, mlp.unbeaten
        apart = product(range(len(first.apart)), range(len(second.apart)))
        joined = zip(range(len(first.apart), len(first)), range(len(second.apart), len(second)), strict=False)
        columns = _columns(first, second, [*apart, *joined])
        moments = columns.whole.T if last else np.array([np.maximum(columns.need, 0), columns.ahead.max(axis=1)])
        host_s = [columns.host_s.sum(axis=1)] if hosted else []
        return columns.at(unbeaten([columns.longer_s, columns.resident, *moments, *host_s]))

    @once
    def _ways(self, halves: tuple[Choices, ...], grouped: Inside) -> tuple[Table, Numbers]:
        """Return the columns of layers in groups that keep one input, and for each size and number of groups those of the lower
        layers.

            group of two          mlp(2)          attention(2)      mlp(1)       attention(1)
            recomputed            a + b + c + d   a + b + c         a + b        a

        All that a group recomputes is held when the backward of its last half begins, and is freed half by half: each half counts
        the remaining bytes as its own. A last group may be smaller.
        """
        able = iter(bool(choices.joined) and each is not None for choices, each in zip(halves, grouped, strict=False))
        most = sum(1 for _ in takewhile(all, zip(able, able, strict=True)))
        inside = [each for each in grouped[: len(HALVES) * most] if each is not None]
        layers, ways = len(halves) // len(HALVES), []
        numbers: dict[object, int] = {}
        columns: list[LayerOptions] = []
        for size in range(2, most + 1):
            for end in range(size, most + size, size):
                way = np.full(layers, -1, dtype=np.intp)
                for layer in range(min(end, most)):
                    begin = layer - layer % size
                    last = layer == min(begin + size, most) - 1
                    key = (*inside[2 * begin : 2 * layer + 2], last)
                    if key not in numbers:
                        numbers[key] = len(columns)
                        columns.append(_in_group(inside, begin, layer, last=last))
                    way[layer] = numbers[key]
                ways.append(way)
        attention, mlp = (Choices(layer[half] for layer in columns) for half in range(len(HALVES)))
        pairs = [(number, number) for number in range(len(columns))]
        return _columns(attention, mlp, pairs), np.array(ways, dtype=np.intp).reshape(-1, layers)


def _solved(problem: StageProblem, halves: Iterable[Option]) -> Solved:
    return Solved(tuple(halves), problem.in_flight, loss_bytes=problem.loss_bytes)


def keep_all(problem: StageProblem) -> Solved:
    """Whatever that holds."""
    return _solved(problem, chain.from_iterable(problem.under("none").halves))


@dataclass(frozen=True, eq=False)
class _Layers:
    """Columns of the lower layers are numbered through all kinds, then those of layers in groups."""

    kind_of_layer: Numbers
    ranges: list[tuple[int, int]]
    """First column of each kind, and the one after its last."""
    columns: Table
    last: Table
    ways: Numbers
    """Columns of the lowest layers, a row for each size and number of groups; -1 above the groups. [3]"""
    hosted: bool
    """Whether host seconds count."""
    leaving: bool
    """As in `StageProblem`."""

    @cached_property
    def starts(self) -> Numbers:
        """Answers from which the search begins: as the price of a byte rises, in seconds, in the host's alone, or in need, one
        layer after the other gets its kind's next column. [1] [3]"""
        host_s = [self.columns.host_s.sum(axis=1)] if self.hosted else []
        costs = self.columns.longer_s, self.columns.need, *host_s
        alike = [self._at_prices(cost)[:, self.kind_of_layer] for cost in costs]
        rows = alike  # above groups, all layers of a kind change together: there are many ways already
        if (self.ways < 0).all():
            rows = [each[:1] for each in alike]
            for own, to in chain.from_iterable(map(pairwise, alike)):
                changed = np.cumsum(own != to)
                rows.append(np.where(changed <= np.arange(1, changed[-1] + 1)[:, None], to, own))
        above = np.concatenate(rows)
        return self.ordered(np.concatenate([np.where(way < 0, above, way) for way in self.ways]))

    def _at_prices(self, cost: Floats) -> Numbers:
        """Return columns of all kinds. At each rising price of a byte one kind moves on to its next vertex."""
        kind = np.repeat(np.arange(len(self.ranges)), [end - begin for begin, end in self.ranges])
        cost, size = cost[: len(kind)], self.columns.resident[: len(kind)]
        order = np.lexsort((size, cost))
        own = np.array([order[kind[order] == each][0] for each in range(len(self.ranges))], dtype=np.intp)
        corners = [own]
        while len(kind):
            freed = size[own][kind] - size
            price = np.divide(cost - cost[own][kind], freed, out=np.full(len(kind), np.inf), where=freed > 0)
            to = np.lexsort((-freed, kind, price))[0]
            if not np.isfinite(price[to]):
                break
            own = own.copy()
            own[kind[to]] = to
            corners.append(own)
        return np.array(corners)

    def ordered(self, rows: Numbers) -> Numbers:
        """Order each run of layers of one kind by need, the largest lowest. Groups stay in place."""
        key = self._rank[rows]
        for begin, end in self._runs:
            order = np.argsort(key[:, begin:end], axis=1, kind="stable")
            rows[:, begin:end] = np.take_along_axis(rows[:, begin:end], order, axis=1)
        return rows

    @cached_property
    def _rank(self) -> Numbers:
        """Rank of each column from the lowest layer up: by need, or by resident bytes if lowest layers are offloaded first."""
        columns = self.columns
        order = np.lexsort((columns.ahead.sum(axis=1), columns.resident if self.leaving else columns.need))[::-1]
        rank = np.empty(len(order), dtype=np.intp)
        rank[order] = np.arange(len(order))
        rank[self.ranges[-1][1] if self.ranges else 0 :] = -1
        return rank

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        borders = np.flatnonzero(np.diff(self.kind_of_layer, prepend=-1, append=-1)).tolist()
        return list(pairwise(borders))

    def blocks(self, lower: Numbers) -> Iterator[tuple[int, Numbers]]:
        """Yield the kind and the layers of a run that have one column."""
        for begin, end in self._runs:
            kind = int(self.kind_of_layer[begin])
            for column in dict.fromkeys(lower[begin:end].tolist()):
                if column < self.ranges[kind][1]:  # not in a group
                    yield kind, begin + np.flatnonzero(lower[begin:end] == column)


@dataclass(frozen=True, eq=False)
class _Stage:
    """One problem of these layers."""

    problem: StageProblem
    layers: _Layers

    def best(self, budget_bytes: float | None) -> Iterator[Solved]:
        """Yield the fastest answer that fits, if one is found; without a budget, the one with the least peak."""
        found = self._best(self.layers.starts, budget_bytes) or self._best(self._leanest.lower[None], budget_bytes)
        if found is not None:
            answer = self._improved(found, budget_bytes)
            lower = (self.layers.columns.halves[number] for number in answer.lower.tolist())
            yield _solved(self.problem, chain(*lower, self.layers.last.halves[answer.last]))

    @property
    def _leanest(self) -> Answer:
        found = self._best(self.layers.starts, None)
        assert found is not None
        return self._improved(found, None)

    def _improved(self, found: Answer, budget_bytes: float | None) -> Answer:
        """[2]"""
        while True:
            better = self._best(self._changed(found, budget_bytes), budget_bytes)
            if (better is None or better.costs >= found.costs) and budget_bytes is not None:
                better = self._best(self._changed_twice(found, budget_bytes), budget_bytes)
            if better is None or better.costs >= found.costs:
                return found
            found = better

    def _best(self, rows: Numbers, budget_bytes: float | None) -> Answer | None:
        """Return the best of these ways of the lower layers with any last layer: the fastest that fits, or the least peak."""
        if budget_bytes is not None:
            rows = rows[self._held(rows) + self._least_on_top <= budget_bytes]
        if not len(rows):
            return None
        seconds, peaks, resident = self._evaluated(rows)
        cost, tie = (peaks, seconds) if budget_bytes is None else (np.where(peaks <= budget_bytes, seconds, np.inf), peaks)
        if not np.isfinite(least := cost.min()):
            return None
        equals = np.flatnonzero(cost == least)
        first = equals[np.lexsort((resident.ravel()[equals], tie.ravel()[equals]))[0]]
        row, last = divmod(int(first), cost.shape[1])
        return Answer((float(least), float(tie[row, last])), rows[row], last)

    def _evaluated(self, rows: Numbers) -> tuple[Floats, Floats, Floats]:
        """Return seconds, peaks and resident bytes: (rows, columns of the last layer)."""
        lower, last, others = self.layers.columns, self.layers.last, self.problem.in_flight - 1
        resident = lower.resident[rows]
        below = resident.cumsum(axis=1) - resident
        moments = lower.whole[rows] + below[..., None]
        moments[:, 1:] += lower.ahead[rows[:, :-1]]
        ahead = lower.ahead[rows[:, -1]] if rows.shape[1] else np.zeros((len(rows), len(HALVES) * 2))
        by_moment = (own + above[:, None] for own, above in zip(last.whole.T, ahead.T, strict=True))
        on_top = reduce(np.maximum, by_moment, last.resident + self.problem.loss_bytes)
        peaks = np.maximum(moments.max(axis=(1, 2), initial=0)[:, None], resident.sum(axis=1)[:, None] + on_top)
        resident = resident.sum(axis=1)[:, None] + last.resident
        seconds = lower.longer_s[rows].sum(axis=1)[:, None] + last.longer_s
        late_s = self._late_s(rows, seconds)
        return np.round(seconds + late_s, SECOND_DIGITS), peaks + np.ceil(others * resident), resident

    def _late_s(self, rows: Numbers, seconds: Floats) -> Floats | float:
        if (device := self.problem.device) is None:
            return 0.0
        host_s = self.layers.columns.host_s[rows].sum(axis=1)[:, None] + self.layers.last.host_s
        backward_s = host_s[..., 1] - device.backward_s - seconds
        return np.asarray(np.maximum(0, host_s[..., 0] - device.forward_s) + np.maximum(0, backward_s))

    def _held(self, rows: Numbers) -> Floats:
        """Bytes of the lower layers when backward begins, with all other micro-batches in flight."""
        return np.asarray(self._size[rows].sum(axis=1))

    @cached_property
    def _least_on_top(self) -> float:
        """Least number of bytes that the last layer adds."""
        most = np.maximum(self.layers.last.whole.max(axis=1), self.layers.last.resident + self.problem.loss_bytes)
        return float(((self.problem.in_flight - 1) * self.layers.last.resident + most).min())

    @cached_property
    def _size(self) -> Floats:
        return np.asarray(self.problem.in_flight * self.layers.columns.resident)

    def _changed(self, found: Answer, budget_bytes: float | None) -> Numbers:
        """Return the answer with 1, 2, 4 ... or all layers of a block changed to another column."""
        rows = [np.empty((0, len(found.lower)), dtype=np.intp)]
        for kind, layers in self.layers.blocks(found.lower):
            columns = np.arange(*self.layers.ranges[kind])
            for count in _doubled(len(layers)):
                more = found.lower[None].repeat(len(columns), axis=0)
                more[:, layers[:count]] = columns[:, None]
                rows.append(more)
        changed = np.concatenate(rows)
        if budget_bytes is not None:
            changed = changed[
                self.layers.columns.longer_s[changed].sum(axis=1) + self.layers.last.longer_s.min() <= found.costs[0]
            ]
        return self.layers.ordered(changed)

    def _changed_twice(self, found: Answer, budget_bytes: float) -> Numbers:
        """Return the answer with two layers changed that get faster and hold no more when backward begins."""
        changes = [
            (layer, column, nth)
            for kind, layers in self.layers.blocks(found.lower)
            for nth, layer in enumerate(layers[:2].tolist())
            for column in range(*self.layers.ranges[kind])
        ]
        layer, column, nth = np.array(changes, dtype=np.intp).reshape(-1, 3).T
        first, own = np.flatnonzero(nth == 0), found.lower[layer]
        longer_s, more = (costs[column] - costs[own] for costs in (self.layers.columns.longer_s, self._size))
        both_s = longer_s[first, None] + longer_s
        room = budget_bytes - self._evaluated(found.lower[None])[1][0, found.last]
        fit = (both_s < 0) & (more[first, None] + more <= room) & (layer[first, None] != layer)
        one, other = np.nonzero(fit)
        picked = np.argsort(both_s[one, other], kind="stable")[:MOST_PAIRS]
        rows = found.lower[None].repeat(len(picked), axis=0)
        for changes_of in (first[one[picked]], other[picked]):
            rows[np.arange(len(rows)), layer[changes_of]] = column[changes_of]
        return self.layers.ordered(rows)


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4 ... and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _in_group(inside: Sequence[Grouped], begin: int, layer: int, *, last: bool) -> tuple[Option, Option]:
    """Return a layer of a group that begins with another layer, or with it."""
    halves = [each.inside for each in inside[2 * begin : 2 * layer + 2]]
    halves[0] = inside[2 * begin].edge
    if last:
        halves[-1] = inside[2 * layer + 1].edge
    made = [0, *accumulate(half.memory.regenerated for half in halves)]
    attention, mlp = (
        replace(
            half,
            memory=replace(
                half.memory, regenerated=half.memory.regenerated + there, tail=half.memory.tail + there, ahead=(0, 0, 0, 0)
            ),
        )
        for half, there in zip(halves[-2:], made[-3:-1], strict=True)
    )
    return attention, mlp
