"""The per-layer solver: identical layers get identical choices, as far as the budget is worth it (Lynx's HEU, our formulation).

    layers of one stage     1 ... n-k-1     n-k ... n-1          n
    choice                      X               Y           attention as the layer below, last MLP half Z

X, Y and Z run over every choice that no other one beats. Where Y is faster than X, k is the most layers of Y that fit, else the
fewest: halves that need little while their backward runs belong on top, where most is held, be they kept or replayed late.
Exact among answers of this form, by enumeration, and deterministic:

    with a budget     fastest backward, then least peak, then fewest resident bytes; layers of two kinds are only looked at
                      where they could be faster than layers of one
    without one       least peak, then fastest backward, then fewest resident bytes; all layers alike, and every replay
                      in the window of its backward that hides most of it: leaving a window empty saves no memory
The last tie goes to the choice that comes first in the problem. More budget allows every answer that less allows, so it never
costs time. An on-demand replay is exposed whole, so a window never makes an answer worse.

    layers alike, priced at once ──> the best so far ──> pairs (X, Y) that could beat it ──> priced with every Z
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.solver import mixed
from megatron_lynx.solver.answer import Solved, infeasible
from megatron_lynx.solver.form import Form
from megatron_lynx.solver.problem import Floats, StageProblem

ROUNDED_S = 1e-11
"""Rounding seconds changes them by less than this."""

BATCH = 128
"""Pairs that are priced at once."""

MOST_BYTES = 10**100
"""Larger budgets are cut to this one."""


@dataclass(frozen=True)
class _Candidates:
    """Answers of a form: X, Y, Z and k of each."""

    form: Form
    below: NDArray[np.intp]
    above: NDArray[np.intp]
    last: NDArray[np.intp]
    count: Floats

    def priced(self, cost: Callable[..., Floats]) -> Floats:
        return cost(self.below, self.above, self.last, self.count)

    def where(self, chosen: Any) -> _Candidates:
        return _Candidates(self.form, self.below[chosen], self.above[chosen], self.last[chosen], self.count[chosen])

    def first(self) -> Solved:
        return self.form.answer(int(self.below[0]), int(self.above[0]), int(self.last[0]), int(self.count[0]))


def solve(problem: StageProblem) -> Solved:
    """The best answer. Raises `Infeasible` when not even the least memory fits the budget."""
    if problem.mixed is not None:
        return mixed.solve(problem)
    if problem.budget_bytes is None:
        return least_memory(problem.best_seated)
    form = Form(problem)
    uniform = _uniform(form)
    budget_bytes = float(min(problem.budget_bytes, MOST_BYTES))
    for answer in _time_first(_joined([uniform, *_mixed(form, uniform, budget_bytes)]), budget_bytes):
        if answer.peak_bytes <= problem.budget_bytes:  # what is beyond 2^53 bytes was rounded
            return answer
    raise infeasible(problem, least_memory(problem))


def least_memory(problem: StageProblem) -> Solved:
    """The answer with all layers alike that has the least peak, whatever it exposes. Ties: as without a budget."""
    if problem.mixed is not None:
        return mixed.least_memory(problem)
    uniform = _uniform(Form(problem))
    cost = uniform.form
    return uniform.where(_ordered(uniform, cost.peak_bytes, cost.longer_s, cost.resident_bytes)).first()


def _uniform(form: Form) -> _Candidates:
    """All layers alike, with every Z."""
    layer, last = np.divmod(np.arange(form.layers * form.lasts), form.lasts)
    return _Candidates(form, layer, layer, last, np.full(len(layer), float(form.below_last)))


def _mixed(form: Form, uniform: _Candidates, budget_bytes: float) -> Iterator[_Candidates]:
    """Every X, Y and Z with the best k that fits, as long as that could be faster than the best answer so far."""
    if form.below_last < 2:
        return
    best_s = _least_s(uniform, budget_bytes)
    pairs, bounds_s = _promising(form, best_s, budget_bytes)
    while len(pairs) and bounds_s[0] < best_s - ROUNDED_S:
        for candidates in _with_every_last(form, pairs[:BATCH], budget_bytes):
            best_s = min(best_s, _least_s(candidates, budget_bytes))
            yield candidates
        pairs, bounds_s = pairs[BATCH:], bounds_s[BATCH:]


def _promising(form: Form, best_s: float, budget_bytes: float) -> tuple[NDArray[np.intp], Floats]:
    """Pairs of X and Y, numbered, with the least that they could expose whatever Z is, where that could be best."""
    below, above = form.lower[:, None], np.arange(form.layers)[None, :]
    count = form.count_at_best(below, above, budget_bytes)
    bounds_s = form.longer_s(below, above, int(form.last.longer_s.argmin()), count)
    rows, columns = np.nonzero((below != above) & (count > 0) & (bounds_s < best_s - ROUNDED_S))
    ordered = np.argsort(bounds_s[rows, columns], kind="stable")
    rows, columns = rows[ordered], columns[ordered]
    return form.lower[rows] * form.layers + columns, bounds_s[rows, columns]


def _with_every_last(form: Form, pairs: NDArray[np.intp], budget_bytes: float) -> Iterator[_Candidates]:
    """The best count with at least two layers of X left, and the one that leaves one."""
    pair, last = np.divmod(np.arange(len(pairs) * form.lasts), form.lasts)
    below, above = np.divmod(pairs[pair], form.layers)
    count = form.count(below, above, last, budget_bytes)
    yield _Candidates(form, below, above, last, count).where(count > 0)
    yield _Candidates(form, below, above, last, np.full(len(last), form.below_last - 1.0))


def _least_s(candidates: _Candidates, budget_bytes: float) -> float:
    fitting = candidates.where(candidates.priced(candidates.form.peak_bytes) <= budget_bytes)
    return float(fitting.priced(candidates.form.longer_s).min(initial=np.inf))


def _joined(candidates: Sequence[_Candidates]) -> _Candidates:
    columns = ([getattr(one, name) for one in candidates] for name in ("below", "above", "last", "count"))
    below, above, last, count = (np.concatenate(column) for column in columns)
    return _Candidates(candidates[0].form, below, above, last, count)


def _time_first(candidates: _Candidates, budget_bytes: float) -> Iterator[Solved]:
    """Answers that fit, the fastest first."""
    form = candidates.form
    left = candidates.where(candidates.priced(form.peak_bytes) <= budget_bytes)
    while len(left.count):
        best = _ordered(left, form.longer_s, form.peak_bytes, form.resident_bytes)
        yield left.where(best).first()
        left = left.where(np.setdiff1d(np.arange(len(left.count)), best[:1]))


def _ordered(candidates: _Candidates, *costs: Callable[..., Floats]) -> NDArray[np.intp]:
    """Numbers of those that are least in the first cost, among them in the next, and so on; in the order of the problem."""
    chosen = np.arange(len(candidates.count))
    for cost in costs:
        values = candidates.where(chosen).priced(cost)
        chosen = chosen[values == values.min()]
    return chosen
