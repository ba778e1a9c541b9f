"""The fastest ways to run a job on so many devices: nothing that could win is left out, and little else is priced.

    every layout, micro-batch size and policy
       │ parameters, gradients and optimizer alone do not fit ──> lost, all policies at once
       v
    [1] by its floor          seconds without copies to the host: a few additions            `floor`
    [2] does it fit?          smallest offload ratio, or lost; closed form of the step       `fit`, `cost.step`
    [3] simulated             the best micro-batch size and policy of each layout            `simulated`
    [4] won

One queue, least seconds first: each is taken out at the least time that it can have, looked at more closely, and put back at
the time it then has. What comes out at [4] beats whatever is still in the queue; so after `top` of them the rest is slower.
Equals: the layout that `space` has first, then the policy that was asked for first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.step import step_seconds
from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.fit import Excess, Fits, always_bytes, fit
from megatron_lynx.search.floor import LayerCost
from megatron_lynx.search.losers import Losers
from megatron_lynx.search.simulated import pipeline_s
from megatron_lynx.search.space import Space
from megatron_lynx.search.spent import Spent

SECOND_DIGITS = 12
"""Seconds that agree to a picosecond are equal: sums of floats in another order must not decide."""

Watch = Callable[[int, int], None]
"""Told now and then how many candidates have been looked at, and of how many."""


@dataclass(frozen=True)
class _Open:
    """One candidate on its way: as far as it has been looked at."""

    job: Job
    cost: LayerCost
    spent: Spent
    fits: Fits | None = None
    won: Candidate | None = None


@dataclass
class BestFirst:
    """One search. `run` once."""

    space: Space
    policies: Sequence[Policy]
    top: int
    offload: bool = True
    watch: Watch | None = None
    considered: int = 0
    examined: int = 0
    losers: Losers = field(default_factory=Losers)
    excesses: list[Excess] = field(default_factory=list)
    _costs: dict[tuple[Any, ...], LayerCost] = field(default_factory=dict)
    _queue: list[tuple[float, int, _Open]] = field(default_factory=list)
    _taken: set[Parallel] = field(default_factory=set)
    _beaten: list[_Open] = field(default_factory=list)

    def run(self) -> list[Candidate]:
        """The `top` fastest, or as many as fit."""
        self._fill()
        won: list[Candidate] = []
        while self._queue and len(won) < self.top:
            _, order, entry = heappop(self._queue)
            if entry.won is not None:
                won.append(entry.won)
            else:
                self._examine(order, entry)
        if won:
            for entry in (*self._beaten, *(entry for _, _, entry in self._queue)):
                self.losers.slower(entry.job, entry.spent, won[0].spent)
        return won

    def _fill(self) -> None:
        """[1] of all whose state fits."""
        updates: dict[tuple[int, ...], float] = {}
        for parallel in self.space.layouts():
            jobs = list(self.space.on(parallel))
            self.considered += len(jobs) * len(self.policies)
            if (state := always_bytes(jobs[0])) > jobs[0].memory_budget_bytes:
                count = len(jobs) * len(self.policies)
                self.losers.add("state", jobs[0], state, jobs[0].memory_budget_bytes, count=count)
                continue
            key = (parallel.tensor, parallel.context, parallel.pipeline)
            for job in jobs:
                cost = self._cost(job)
                if key not in updates:
                    updates[key] = step_seconds(job, cost.profile).update_s
                for policy in self.policies:
                    own = job.model_copy(update={"policy": policy})
                    self._put(len(self._queue), _Open(own, cost, cost.floor(own).with_update(updates[key])))
        heapify(self._queue)

    def _examine(self, order: int, entry: _Open) -> None:
        if entry.fits is None:
            self._told()
            self._fit(order, entry)
        elif entry.job.parallel in self._taken:
            self._beaten.append(entry)
        else:
            self._taken.add(entry.job.parallel)
            heappush(self._queue, self._keyed(order, replace(entry, won=_simulated(entry, entry.fits))))

    def _fit(self, order: int, entry: _Open) -> None:
        """[2]"""
        fits = fit(entry.job, self.offload)
        if isinstance(fits, Excess):
            self.excesses.append(fits)
            self.losers.add("host memory" if fits.host else "activations", entry.job, fits.found, fits.limit)
            return
        copies_s = step_seconds(entry.job, entry.cost.profile, fits.offload_ratio).copies_s
        heappush(self._queue, self._keyed(order, replace(entry, fits=fits, spent=replace(entry.spent, copies_s=copies_s))))

    def _put(self, order: int, entry: _Open) -> None:
        self._queue.append(self._keyed(order, entry))

    def _keyed(self, order: int, entry: _Open) -> tuple[float, int, _Open]:
        seconds = entry.spent.total_s if entry.won is None else entry.won.step_s
        return round(seconds, SECOND_DIGITS), order, entry

    def _cost(self, job: Job) -> LayerCost:
        """Of one layer and its links; asked again for every pipeline."""
        layout = job.parallel
        key = (layout.tensor, layout.context, layout.sequence_parallel, layout.pipeline > 1, job.batch.micro)
        if key not in self._costs:
            self._costs[key] = LayerCost.of(job)
        return self._costs[key]

    def _told(self) -> None:
        self.examined += 1
        if self.watch is not None:
            self.watch(self.examined, self.considered)


def _simulated(entry: _Open, fits: Fits) -> Candidate:
    """[3] The closed form knows what the simulator does not, that copies and messages take turns: no less than it says."""
    job = entry.job.model_copy(update={"offload_ratio": fits.offload_ratio})
    update_s = step_seconds(job, entry.cost.profile).update_s
    step_s = pipeline_s(job, entry.cost.profile, fits.offload_ratio) + update_s
    return Candidate(job, max(step_s, entry.spent.total_s), entry.spent, fits.memory.total, fits.memory)
