"""Best-first search for the fastest ways to run a job: prices only candidates that may win.

    policies without a plan    floor ──> does it fit? ──> simulated
    plans                      floor ──> first stage solved ──> last stage solved ──> ... ──> rehearsed

One queue, ordered by lower bounds of the step: an entry is popped, looked at, and pushed again with its new, larger bound. A
complete one that is popped beats the rest of the queue. Among equals, the first layout of `space` and the first policy wins. A
layout counts with its best micro-batch size and policy, the rest of it is skipped then.

Solving a stage costs as much as ten floors, so plans are solved stage by stage, as long as their bound is the least. The first
stage has most micro-batches in flight, the last one the head. Plans are ordered without weight gradients in waits, which shorten
a step by up to 8 %: placing them takes four times as long as everything before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.parameters import throughput
from megatron_lynx.cost.stage import of_every_stage, stage_seconds
from megatron_lynx.cost.stage_memory import always_bytes
from megatron_lynx.cost.step import waited_messages
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible
from megatron_lynx.planner import Decision, fitting
from megatron_lynx.planner.checks import refusals
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.search.space import Space
from megatron_lynx.solver.stages import Stages
from megatron_lynx.stock import FULL, OF_POLICY, priced
from megatron_lynx.stock.price import memory_of_stages
from megatron_lynx.units import SECOND_DIGITS

STOCK: tuple[Policy, ...] = ("none", "selective", "full")
"""Policies that need no plan."""


@dataclass(frozen=True)
class Candidate:
    """`job` has its layout, micro-batch size and policy, and its offload ratio unless a plan decides that."""

    job: Job
    step_s: float
    """As simulated, with gradients and optimizer."""
    offload_ratio: float
    """The largest of all stages."""
    memory_bytes: int
    """Bytes of the fullest stage."""
    decision: Decision | None = field(default=None, repr=False, compare=False)
    """A plan before weight gradients are placed."""

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "parallel": self.job.parallel.model_dump(mode="json", exclude_none=True),
            "replicas": self.job.replicas,
            "batch": self.job.batch.model_dump(mode="json", by_alias=True),
            "policy": self.job.policy,
            "offload_ratio": self.offload_ratio,
            "step_s": self.step_s,
            **throughput(self.job, self.step_s),
            "memory_bytes": self.memory_bytes,
            "budget_bytes": self.job.memory_budget_bytes,
        }


def in_words(job: Job) -> str:
    """`t4 c1 p8 d8, 2 layers per chunk, SP, micro-batch 2, full`: sizes are tensor, context, pipeline and data parallel."""
    parallel = job.parallel
    sizes = f"t{parallel.tensor} c{parallel.context} p{parallel.pipeline} d{job.replicas}"
    chunks = f"{parallel.layers_per_chunk} layers per chunk" if parallel.layers_per_chunk else ""
    slices = "SP" if parallel.sequence_parallel else ""
    experts = f"e{parallel.expert}" if job.model.experts is not None else ""
    parts = (f"{sizes} {experts}".strip(), chunks, slices, f"micro-batch {job.batch.micro}", job.policy)
    return ", ".join(part for part in parts if part)


def held(job: Job) -> Iterator[StageMemory]:
    """Return the memory of the stages under a policy of stock's, for a plan that of full recomputation."""
    return memory_of_stages(job, OF_POLICY.get(job.policy, FULL))


def fits(job: Job) -> bool:
    """Whether a job fits under its policy of stock's, a plan with everything recomputed."""
    return all(memory.total <= job.memory_budget_bytes for memory in held(job)) and host_shortage(job, 0.0) is None


@dataclass(frozen=True)
class LayerCost:
    """Prices of a layer, which pipelines, chunks and replicas share, so that a floor of each is a few additions."""

    profile: Profile
    recompute_s: Mapping[Policy, float]
    """One micro-batch on one rank."""
    message_s: float

    @classmethod
    def of(cls, job: Job) -> LayerCost:
        profile = analytic_profile(job)
        one_stage = job.parallel.model_copy(update={"pipeline": 1, "layers_per_chunk": None, "partition": None})
        flat, device = job.model_copy(update={"parallel": one_stage}), profile.model_copy(update={"host_time": None})
        whole = {policy: priced(flat, device, OF_POLICY[policy]).microbatch_s(0).both_s for policy in STOCK}
        again = {policy: (seconds - whole["none"]) / job.model.layers for policy, seconds in whole.items()}
        return cls(profile, again, profile.link_s("p2p", LayerShape.of(job).input_bytes))

    def floor_s(self, job: Job, stages_s: Sequence[float]) -> float:
        """A lower bound of a step without its update: the slowest stage, and one micro-batch on the others, without host time.
        Each message between stages is waited for once. A plan may hide all its recomputation. `stages_s`: as below."""
        pipeline = job.parallel.pipeline
        again_s = min(map(job.layers_on, range(pipeline))) * self.recompute_s.get(job.policy, 0.0)
        passes_s = job.microbatches * (max(stages_s) + again_s)
        if job.schedule != "flush":  # later passes can hide all waits
            return passes_s
        bubble_s = (sum(stages_s) - max(stages_s) + (pipeline - 1) * again_s) / job.chunks
        return passes_s + bubble_s + 2 * waited_messages(job) * self.message_s

    def stages_s(self, job: Job) -> list[float]:
        """Seconds of one micro-batch on each stage without recomputation."""
        return of_every_stage(job, lambda stage: stage_seconds(job, self.profile, stage).both_s)


Looks = Iterator["float | Candidate"]
"""Yields larger and larger lower bounds of a step, then the candidate if it fits and is not the same as policy `none`."""


def looks_at_stock(job: Job, profile: Profile) -> Looks:
    price = priced(job, profile, OF_POLICY[job.policy])
    if price.fits(job.memory_budget_bytes) and host_shortage(job, 0.0) is None:
        yield Candidate(job, price.step_s + update_s(job, profile), 0.0, price.most_bytes)


def looks_at_plan(job: Job, profile: Profile, floor_s: float, kept_s: float, *, besides_none: bool = False) -> Looks:
    """`kept_s`: of the slowest stage without recomputation. `besides_none`: whether policy `none` is a candidate, too."""
    if besides_none and fits(job.model_copy(update={"policy": "none"})):
        return
    stages, last = Stages(job, profile), job.parallel.pipeline - 1
    if not all(map(stages.least_fits, {0, last})):
        return
    exposed_s = copies_s = 0.0  # of the slowest stage so far
    with suppress(Infeasible):
        for answer in map(stages.answer, dict.fromkeys((0, last, *range(last)))):
            exposed_s = max(exposed_s, answer.stock.both_s + answer.longer_s - kept_s)
            copies_s = max(copies_s, answer.exposed_copies_s)
            bound_s = floor_s + job.microbatches * exposed_s + copies_s
            yield bound_s
        decision = fitting(stages)
        # the bound is kept if the simulated step is shorter: only the closed form knows that copies and messages alternate
        step_s = max(decision.figures.step_s, bound_s)
        yield Candidate(job, step_s, decision.offload_ratio, decision.memory_bytes, decision)


@dataclass
class BestFirst:
    """Call `run` once."""

    space: Space
    policies: Sequence[Policy]
    offload: bool = True
    considered: int = 0
    unfit: list[Job] = field(default_factory=list)
    """Candidates whose state fits, and nothing else, if none fits at all."""
    _costs: dict[tuple[Any, ...], LayerCost] = field(default_factory=dict)
    _queue: list[tuple[float, int, Job, Looks | Candidate]] = field(default_factory=list)
    """By rounded bound and order."""

    def run(self) -> Iterator[Candidate]:
        """Yield each winner once it is known, the fastest first."""
        for jobs in self.space.layouts():
            self._open(jobs)
        heapify(self._queue)
        taken = set[Parallel]()
        while self._queue:
            _, order, job, looks = heappop(self._queue)
            if job.parallel in taken:  # by one whose step is at most this one's bound
                continue
            if isinstance(looks, Candidate):
                taken.add(job.parallel)
                yield looks
            elif (found := next(looks, None)) is None:
                self.unfit.append(job)
            else:
                bound_s, looks = (found, looks) if isinstance(found, float) else (found.step_s, found)
                heappush(self._queue, (round(bound_s, SECOND_DIGITS), order, job, looks))

    def _open(self, jobs: Sequence[Job]) -> None:
        self.considered += len(jobs) * len(self.policies)
        if always_bytes(jobs[0]) > jobs[0].memory_budget_bytes:
            return
        least_update_s = update_s(jobs[-1], self._cost(jobs[-1]).profile)  # more of it overlaps with larger micro-batches
        takes_plans = self.space.takes_plans(jobs[0].parallel) and not refusals(jobs[0])
        policies = [policy for policy in self.policies if policy != "planned" or takes_plans]
        for job in jobs:
            stages_s = self._cost(job).stages_s(job)
            for policy in policies:
                self._queue.append(self._floored(job.model_copy(update={"policy": policy}), stages_s, least_update_s))

    def _floored(self, job: Job, stages_s: Sequence[float], least_update_s: float) -> tuple[float, int, Job, Looks]:
        cost = self._cost(job)
        floor_s = cost.floor_s(job, stages_s) + least_update_s
        if job.policy == "planned":
            job = job.model_copy(update={"offload_ratio": "auto" if self.offload else 0.0})
            looks = looks_at_plan(job, cost.profile, floor_s, max(stages_s), besides_none="none" in self.policies)
        else:
            looks = looks_at_stock(job, cost.profile)
        return round(floor_s, SECOND_DIGITS), len(self._queue), job, looks

    def _cost(self, job: Job) -> LayerCost:
        layout = job.parallel
        key = (layout.tensor, layout.context, layout.sequence_parallel, layout.pipeline > 1, job.batch.micro, layout.expert)
        if key not in self._costs:
            self._costs[key] = LayerCost.of(job)
        return self._costs[key]
