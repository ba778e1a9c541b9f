"""Best-first search for the fastest ways to run a job: exact, but prices only candidates that may win.

    every layout, micro-batch size and policy
       │ parameters, gradients and optimizer alone do not fit ──> lost, for all policies
       v
    floor         seconds without copies and, for a plan, without exposed recomputation: a few additions
    looked at     whether it fits, and its share on the host; closed form of the step                 `entry`
    simulated     the best micro-batch size and policy of each layout
    won

One queue, ordered by lower bounds: an entry is popped, looked at, and pushed again with its new, larger bound. A simulated one
that is popped beats the rest of the queue, so the search ends after `top` of them. Among equals, the first layout of `space` and
the first policy wins.

Python's garbage collector is disabled meanwhile: a search makes millions of small objects and hardly any cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.stage_memory import always_bytes
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError
from megatron_lynx.planner import check_plannable
from megatron_lynx.search.candidate import Candidate
from megatron_lynx.search.entry import Entry, looks_at_plan, looks_at_stock
from megatron_lynx.search.fit import Excess
from megatron_lynx.search.floor import LayerCost
from megatron_lynx.search.losers import Losers
from megatron_lynx.search.space import Layout, Space
from megatron_lynx.units import SECOND_DIGITS

Watch = Callable[[int, int], None]
"""Called at every look with the number of winners known and wanted."""


@dataclass
class BestFirst:
    """One search; call `run` once."""

    space: Space
    policies: Sequence[Policy]
    top: int
    offload: bool = True
    watch: Watch | None = None
    considered: int = 0
    losers: Losers = field(default_factory=Losers)
    excesses: list[Excess] = field(default_factory=list)
    """Excesses of candidates whose state fits."""
    _costs: dict[tuple[Any, ...], LayerCost] = field(default_factory=dict)
    _updates_s: dict[tuple[object, ...], float] = field(default_factory=dict)
    _queue: list[tuple[float, int, Entry | Candidate]] = field(default_factory=list)
    _taken: set[Layout] = field(default_factory=set)
    """Layouts whose best is simulated."""
    _beaten: list[Entry] = field(default_factory=list)

    def run(self) -> tuple[Candidate, ...]:
        """Return the `top` fastest, or as many as fit."""
        for layout in self.space.layouts():
            self._open(list(self.space.on(layout)))
        for job in self.space.short_of_microbatches():
            self.considered += len(self.policies)
            microbatches, needed = job.microbatches, job.parallel.pipeline
            self.losers.add("micro-batches", job, microbatches, needed, rank=needed / microbatches, count=len(self.policies))
        heapify(self._queue)
        won: list[Candidate] = []
        while self._queue and len(won) < self.top:
            if self.watch is not None:
                self.watch(len(won), self.top)
            _, order, entry = heappop(self._queue)
            if isinstance(entry, Candidate):
                won.append(entry)
            elif _layout_of(entry.job) in self._taken:  # by one whose step is at most this one's bound
                self._beaten.append(entry)
            else:
                self._look(order, entry)
        if won:
            for entry in (*self._beaten, *(entry for _, _, entry in self._queue)):
                self.losers.slower(entry.job, entry.spent, won[0].spent)
        return tuple(won)

    def _open(self, jobs: Sequence[Job]) -> None:
        """Queue one layout's micro-batch sizes under each policy."""
        count, budget = len(jobs) * len(self.policies), jobs[0].memory_budget_bytes
        self.considered += count
        if (state := always_bytes(jobs[0])) > budget:
            self.losers.add("state", jobs[0], state, budget, count=count)
            return
        asked, plannable = self.space.takes_plans(jobs[0].parallel), _is_plannable(jobs[0])
        for job in jobs:
            for policy in self.policies:
                policy_job = job.model_copy(update={"policy": policy})
                if policy == "planned" and not (asked and plannable):
                    self.losers.add("cannot run" if asked else "not asked", policy_job, 0.0, 0.0)
                else:
                    self._queue.append(self._keyed(len(self._queue), self._floored(policy_job)))

    def _floored(self, job: Job) -> Entry:
        cost = self._cost(job)
        spent = cost.floor(job).with_update(self._update_s(job))
        if job.policy == "planned":
            looks = looks_at_plan(job, cost, spent, offload=self.offload, besides_none="none" in self.policies)
        else:
            looks = looks_at_stock(job, cost, spent, offload=self.offload)
        return Entry(job, spent, looks)

    def _look(self, order: int, entry: Entry) -> None:
        result = entry.closer()
        if result is None:
            self.losers.add("no plan", entry.job, 0.0, 0.0)
        elif isinstance(result, Excess):
            self.excesses.append(result)
            self.losers.add("host memory" if result.host else "activations", entry.job, result.usage, result.limit)
        else:
            if isinstance(result, Candidate):
                self._taken.add(_layout_of(entry.job))
            heappush(self._queue, self._keyed(order, result))

    def _keyed(self, order: int, entry: Entry | Candidate) -> tuple[float, int, Entry | Candidate]:
        seconds = entry.step_s if isinstance(entry, Candidate) else entry.spent.total_s
        return round(seconds, SECOND_DIGITS), order, entry

    def _cost(self, job: Job) -> LayerCost:
        """Costs of one layer and its links, shared by many pipelines."""
        layout = job.parallel
        key = (layout.tensor, layout.context, layout.sequence_parallel, layout.pipeline > 1, job.batch.micro, layout.expert)
        if key not in self._costs:
            self._costs[key] = LayerCost.of(job)
        return self._costs[key]

    def _update_s(self, job: Job) -> float:
        """Seconds of gradients, optimizer and parameters, shared by many policies, and without overlap by micro-batch sizes."""
        layout, behind = job.parallel, job.batch.micro if job.overlap.gradients else None
        flushes, together = job.schedule == "flush", layout.sequence_parallel
        key = (layout.tensor, layout.context, layout.pipeline, job.chunks, flushes, together, layout.expert, behind)
        if key not in self._updates_s:
            self._updates_s[key] = update_s(job, self._cost(job).profile)
        return self._updates_s[key]


def _layout_of(job: Job) -> Layout:
    return Layout(job.parallel, job.schedule)


def _is_plannable(job: Job) -> bool:
    with suppress(ConfigError):
        check_plannable(job)
        return True
    return False


@contextmanager
def no_collections() -> Iterator[None]:
    """Disables the garbage collector inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
