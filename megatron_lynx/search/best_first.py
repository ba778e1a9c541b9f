"""Best-first search for the fastest ways to run a job: exact, but prices only candidates that may win.

    every layout, micro-batch size and policy
       │ parameters, gradients and optimizer alone do not fit ──> lost, for all policies
       v
    floor         seconds without copies and, for a plan, without exposed recomputation: a few additions
    looked at     whether it fits; closed form of the step
    simulated     the best micro-batch size and policy of each layout
    won

One queue, ordered by lower bounds: an entry is popped, looked at, and pushed again with its new, larger bound. A simulated one
that is popped beats the rest of the queue, so the search ends after `top` of them. Among equals, the first layout of `space` and
the first policy wins.

Python's garbage collector is disabled meanwhile: a search makes millions of small objects and hardly any cycles.

Losers are counted by reason, with the best of each reason next to the winner:

cannot run     no plan can express the layout
not asked      plans with context parallelism, which need `--context` or a job that has it
no plan        everything fits, so a plan would equal policy `none`
state          parameters, gradients and optimizer alone do not fit
activations    does not fit; a plan, with everything offloaded
host memory    the host has too little memory for what is offloaded
slower         by the part that exceeds the winner's most: compute, recompute, communication, bubble, copies

Bounds of a candidate's step only grow from look to look, until it is simulated:

    policies without a plan    floor ──> does it fit? closed form of the step ──> simulated
    plans                      floor ──> first stage solved ──> last stage solved ──> ... ──> rehearsed

Solving a stage costs as much as ten floors, so plans are solved stage by stage, as long as their bound is the least. Of the first
and the last stage one has most micro-batches in flight, the other the head.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any, Literal

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.host_optimizer import least_left_bytes
from megatron_lynx.cost.stage_memory import always_bytes
from megatron_lynx.cost.step import step_seconds
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import ConfigError, Infeasible
from megatron_lynx.planner import check_plannable, fitting, least_memory
from megatron_lynx.planner.evaluation import fullest_bytes
from megatron_lynx.planner.writing import written
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.search.candidate import Candidate, Excess, Spent, fit, in_words, sizes
from megatron_lynx.search.floor import LayerCost
from megatron_lynx.search.space import Space
from megatron_lynx.solver.answer import StageAnswer
from megatron_lynx.solver.stages import Stages
from megatron_lynx.stock import OF_POLICY, priced
from megatron_lynx.units import GIB, SECOND_DIGITS, format_bytes, format_seconds

Looks = Generator[Spent, None, Candidate | Excess | None]
"""Yields larger and larger lower bounds; returns None if policy `none` fits and is a candidate, too."""


@dataclass
class Entry:
    """`spent`: the lower bound known so far."""

    job: Job
    spent: Spent
    looks: Looks

    def closer(self) -> Entry | Candidate | Excess | None:
        """Return the result of the next look."""
        try:
            self.spent = next(self.looks)
        except StopIteration as end:
            result: Candidate | Excess | None = end.value
            return result
        return self


def looks_at_stock(job: Job, cost: LayerCost, floor: Spent) -> Looks:
    """Look closer at a stock policy."""
    memory = fit(job)
    if isinstance(memory, Excess):
        return memory
    messages_s = step_seconds(job, cost.profile).total_s - floor.total_s  # messages that block a stage
    spent = replace(floor, communication_s=floor.communication_s + messages_s)
    yield spent
    price = priced(job, cost.profile, OF_POLICY[job.policy])
    return Candidate(job, price.step_s + update_s(job, cost.profile), spent, 0.0, price.most_bytes)


def looks_at_plan(job: Job, cost: LayerCost, floor: Spent, *, offload: bool, besides_none: bool) -> Looks:
    """Look closer at a plan. `besides_none`: whether policy `none` is a candidate, too."""
    if besides_none and not isinstance(fit(job.model_copy(update={"policy": "none"})), Excess):
        return None
    job = _to_be_planned(job, offload)
    stages, pipeline = Stages(job, cost.profile), job.parallel.pipeline
    if not all(stages.fits(stages.least(stage)) for stage in {0, pipeline - 1}):  # no share fits: none is tried
        return _excess(job, stages)
    solved: dict[int, StageAnswer] = {}
    try:
        for stage in dict.fromkeys((0, pipeline - 1, *range(pipeline))):
            solved[stage] = stages.answer(stage)
            spent = _spent(floor, cost, job, [*solved.values()])
            yield spent
        answers: Sequence[StageAnswer] = [solved[stage] for stage in range(pipeline)]
        plan = written(job, answers, job=job.digest, profile=cost.profile.digest)
        simulation = rehearse(plan, cost.profile, job=job)
        if fullest_bytes(job, simulation) > job.memory_budget_bytes:  # copies lag: plan without such shares
            decision = fitting(stages)
            answers, simulation = decision.stages, decision.simulation
    except Infeasible:
        return _excess(job, stages)
    ratio = max(answer.offload_ratio for answer in answers)
    # the bound is kept if the simulated step is shorter: only the closed form knows that copies and messages alternate
    step_s = max(simulation.step_s + update_s(job, cost.profile), spent.total_s)
    return Candidate(job, step_s, spent, ratio, fullest_bytes(job, simulation))


def _to_be_planned(job: Job, offload: bool) -> Job:
    """The job with the policy `planned`, and with a budget: by default the planner assumes the device's memory only on a GPU."""
    budget = job.budget
    if budget.memory_gib is None:
        budget = budget.model_copy(update={"memory_gib": job.memory_budget_bytes / GIB})
    return job.model_copy(update={"policy": "planned", "offload_ratio": "auto" if offload else 0.0, "budget": budget})


def _spent(floor: Spent, cost: LayerCost, job: Job, answers: Sequence[StageAnswer]) -> Spent:
    """Add the exposed recomputation and copies of these stages to a floor; the slowest stage counts."""
    slowest_s = max(answer.stock.both_s + answer.longer_s for answer in answers)
    recompute_s = job.microbatches * max(0.0, slowest_s - cost.slowest_s(job))
    return replace(floor, recompute_s=recompute_s, copies_s=max(answer.exposed_copies_s for answer in answers))


def _excess(job: Job, stages: Stages) -> Excess:
    """The excess on the fullest stage with everything recomputed and offloaded that can be, or else on the host."""
    memory = least_memory(stages.job, stages.profile)
    stage = max(range(len(memory)), key=lambda number: memory[number].total)
    if memory[stage].total > job.memory_budget_bytes or job.cluster.node is None:
        return Excess(job, stage, memory[stage], memory[stage].total, job.memory_budget_bytes)
    needed = job.host_sharers * max(stages.least(number).host_bytes for number in range(len(memory)))
    return Excess(job, stage, memory[stage], needed, least_left_bytes(job), host=True)


OF_BYTES = ("state", "activations", "host memory")
NO_NUMBERS = ("cannot run", "not asked", "no plan")
REASONS = (*NO_NUMBERS, *OF_BYTES, "compute", "recompute", "communication", "bubble", "copies")


@dataclass(frozen=True)
class Lost:
    """One reason with its best example: the fastest, or the one with the smallest excess.

    `figure` and `limit`: seconds of a part of its step and of the winner's, or bytes and the budget; 0 for reasons
    without figures.
    """

    reason: str
    count: int
    example: str
    figure: float
    limit: float
    unit: Literal["bytes", "seconds"]

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def numbers(self) -> str:
        if self.reason in NO_NUMBERS:
            return ""
        if self.unit == "bytes":
            return f"{format_bytes(self.figure)}, at most {format_bytes(self.limit)}"
        return f"{format_seconds(self.figure)}, the best spends {format_seconds(self.limit)}"


@dataclass
class Losers:
    _counts: Counter[str] = field(default_factory=Counter)
    _best: dict[str, tuple[float, Job, float, float]] = field(default_factory=dict)

    def add(self, reason: str, job: Job, figure: float, limit: float, *, rank: float | None = None, count: int = 1) -> None:
        """`rank`: the least is the example (default `figure`); the first of equals stays."""
        self._counts[reason] += count
        rank = figure if rank is None else rank
        if reason not in self._best or rank < self._best[reason][0]:
            self._best[reason] = rank, job, figure, limit

    def slower(self, job: Job, spent: Spent, winner: Spent) -> None:
        """Count a slower candidate, by the part with the most seconds over the winner's."""
        spent_s, winner_s = vars(spent), vars(winner)
        name = max(spent_s, key=lambda part: spent_s[part] - winner_s[part])
        self.add(name.removesuffix("_s"), job, spent_s[name], winner_s[name], rank=spent.total_s)

    def families(self) -> Iterator[Lost]:
        for reason in (reason for reason in REASONS if reason in self._counts):
            _, job, figure, limit = self._best[reason]
            example = sizes(job) if reason == "state" else in_words(job)
            yield Lost(reason, self._counts[reason], example, figure, limit, "bytes" if reason in OF_BYTES else "seconds")


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
    _taken: set[Parallel] = field(default_factory=set)
    """Layouts whose best is simulated."""
    _beaten: list[Entry] = field(default_factory=list)

    def run(self) -> tuple[Candidate, ...]:
        """Return the `top` fastest, or as many as fit."""
        for layout in self.space.layouts():
            self._open(list(self.space.on(layout)))
        heapify(self._queue)
        won: list[Candidate] = []
        while self._queue and len(won) < self.top:
            if self.watch is not None:
                self.watch(len(won), self.top)
            _, order, entry = heappop(self._queue)
            if isinstance(entry, Candidate):
                won.append(entry)
            elif entry.job.parallel in self._taken:  # by one whose step is at most this one's bound
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
            looks = looks_at_stock(job, cost, spent)
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
                self._taken.add(entry.job.parallel)
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


def _is_plannable(job: Job) -> bool:
    with suppress(ConfigError):
        check_plannable(job)
        return True
    return False


@contextmanager
def no_collections() -> Iterator[None]:
    """Disables the garbage collector inside. Objects made meanwhile become old: the next collection need not visit millions."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.freeze()
            gc.unfreeze()
            gc.enable()
