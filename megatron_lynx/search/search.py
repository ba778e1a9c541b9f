"""Searches for the layouts with which a job is fastest on a number of devices.

job, gpus ──Space──> every layout ──BestFirst──> the fastest that fit ──> Ranking
                                        └── none: the closest, and changes that help ──> Infeasible

The job gives its model, cluster, batch, memory budget, and `parallel.distributed_optimizer` if stated. Layout, micro-batch size,
and policy are searched: stock's and plans, which may offload. All schedules have flushes.

closest      if nothing fits: of all layouts and policies, the stage that is least over its budget
changes      one line for each that alone is enough: other policies, a larger budget, more devices
smallest     for a job that states only model, cluster and devices: the fewest ranks per replica under the first policy that fits,
             without context parallelism, one chunk, micro-batch 1
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any

from megatron_lynx.beside import Later, Watch, results
from megatron_lynx.config.job import Job, Policy
from megatron_lynx.cost.budget import most_beside_layers, shortages
from megatron_lynx.cost.host_optimizer import host_shortage
from megatron_lynx.cost.moments import StageMemory
from megatron_lynx.cost.parameters import throughput
from megatron_lynx.cost.stage_memory import always_bytes
from megatron_lynx.errors import ConfigError, Infeasible, LynxError, Problem, suggestion
from megatron_lynx.planner.decision import fastest_decision, finished
from megatron_lynx.planner.left_open import ways
from megatron_lynx.prediction import within_error
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.roofline import Roofline
from megatron_lynx.search.best_first import STOCK, BestFirst, Candidate, fits, held, in_words
from megatron_lynx.search.space import Space
from megatron_lynx.solver.stages import Stages
from megatron_lynx.tables import WrappedTable
from megatron_lynx.units import GIB, format_bytes, format_seconds

POLICIES: tuple[Policy, ...] = (*STOCK, "planned")

MOST_GPUS = 2**20
MOST_SEQUENCES = 2**32
"""The largest batch. Larger numbers are typing errors and slow to factorise."""


@dataclass(frozen=True)
class Ranking:
    """`candidates`: fastest first, each the best of its layout."""

    job: Job
    gpus: int
    candidates: tuple[Candidate, ...]
    considered: int
    """Layouts times micro-batch sizes times policies."""
    seconds: float

    @property
    def within_error(self) -> str:
        """A sentence if the two fastest differ by less than the error of ratios of layouts, otherwise nothing."""
        if len(self.candidates) < 2:
            return ""
        first, second = (candidate.step_s for candidate in self.candidates[:2])
        unsure = within_error(second, first, experts=self.job.model.experts is not None, layouts=True)
        return unsure and f"the next takes {100 * (second / first - 1):.1f} % more than the fastest. {unsure}"

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "gpus": self.gpus,
            "budget_bytes": self.job.memory_budget_bytes,
            "candidates": [candidate.as_json for candidate in self.candidates],
            "considered": self.considered,
            "seconds": self.seconds,
        }


def search(
    job: Job,
    gpus: int,
    *,
    top: int = 10,
    policies: Sequence[str] = POLICIES,
    offload: bool = True,
    contexts: Sequence[int] | None = None,
    watch: Watch | None = None,
    later: Later = partial,
) -> Ranking:
    """Return the `top` fastest layouts of a job on `gpus` devices, each with its best micro-batch size and policy, as `plan`
    plans it. They are chosen before weight gradients are placed in waits (`best_first`).

    Args:
        offload: whether plans may offload activations.
        contexts: context-parallel sizes, each also with plans; by default all, but plans only for the job's and for 1.
        later: see `megatron_lynx.beside`.

    Raises `ConfigError` if the request is invalid or nothing divides, and `Infeasible` (the binding limit and stage, and changes
    that help) if nothing fits.
    """
    began_s = time.perf_counter()
    space = Space(job, gpus, None if contexts is None else tuple(sorted(set(contexts))))
    tried = _checked(space, top, policies)
    running, finalists = BestFirst(space, tried, offload), list[Candidate]()
    winners = running.run()
    while calls := [later(_planned, winner) for winner in islice(winners, top - len(finalists))]:
        finalists += filter(None, results(calls, watch))
    if not finalists:
        raise nothing_fits(space, tried, running.unfit)
    candidates = tuple(sorted(finalists, key=lambda candidate: candidate.step_s))
    return Ranking(job, gpus, candidates, running.considered, time.perf_counter() - began_s)


def _planned(candidate: Candidate) -> Candidate | None:
    """Return the candidate with the figures of `plan`, which places weight gradients in waits; None if it cannot be planned."""
    if candidate.decision is None:
        return candidate
    job, decision = candidate.job, candidate.decision
    with suppress(LynxError):
        decision = finished(decision) if ways(job) == [job] else fastest_decision(job, decision.profile)
        return Candidate(job, decision.figures.step_s, decision.offload_ratio, decision.memory_bytes)
    return None


def _checked(space: Space, top: int, policies: Sequence[str]) -> tuple[Policy, ...]:
    if problems := [*_problems(space, top, policies)]:
        raise ConfigError("this search makes no sense", problems)
    Roofline.of(space.job)
    if next(space.layouts(), None) is None:
        raise ConfigError(f"nothing divides {space.gpus} devices", [_what_divides(space)])
    return tuple(policy for policy in POLICIES if policy in policies)


def _problems(space: Space, top: int, policies: Sequence[str]) -> Iterator[Problem]:
    job, known = space.job, ", ".join(POLICIES)
    if not 1 <= space.gpus <= MOST_GPUS:
        yield Problem("--gpus", str(space.gpus), f"1 to {MOST_GPUS}")
    if top < 1:
        yield Problem("--top", str(top), "at least 1")
    if space.contexts is not None and (not space.contexts or space.contexts[0] < 1):
        yield Problem("--context", ", ".join(map(str, space.contexts)) or "nothing", "sizes of at least 1")
    if job.batch.global_ > MOST_SEQUENCES:
        yield Problem("job: batch.global", str(job.batch.global_), f"at most {MOST_SEQUENCES}")
    if not policies:
        yield Problem("--policies", "none", f"some of {known}")
    for name in policies:
        if name not in POLICIES:
            yield Problem("--policies", repr(name), f"one of {known}", suggestion(name, POLICIES))
    if job.budget.activation_mib is not None:
        yield Problem("job: budget.activation_mib", f"{job.budget.activation_mib:g}", "none: a search goes by budget.memory_gib")
    if job.optimizer.offload == "auto":
        todo = "state a share: the best one depends on the plan of each layout, and megatron-lynx plan finds it"
        yield Problem("job: optimizer.offload", "auto", "a share in [0, 1]", todo)
    if job.schedule != "flush":
        needed = "flush: schedules that change what is learnt are not ranked against those that do not"
        yield Problem("job: schedule", job.schedule, needed)


def _what_divides(space: Space) -> Problem:
    model, batch = space.job.model, space.job.batch.global_
    near = chain.from_iterable((space.gpus - away, space.gpus + away) for away in range(1, 4096))
    some = (gpus for gpus in near if gpus > 0 and next(Space(space.job, gpus).layouts(), None) is not None)
    nearest_gpus = sorted(islice(some, 4))
    needed = f"tensor x context x pipeline x data, where data divides the batch ({batch}), pipeline the layers ({model.layers})"
    todo = f"the nearest that do: {', '.join(map(str, nearest_gpus))}" if nearest_gpus else ""
    return Problem("--gpus", str(space.gpus), f"{needed}, tensor the heads ({model.heads}) and context the sequence", todo)


def table(ranking: Ranking) -> WrappedTable:
    title = f"{ranking.job.model.layers} layers on {ranking.gpus} devices"
    rows = [_row(candidate) for candidate in ranking.candidates]
    best = WrappedTable(tuple(rows[0]), words=("policy",), keys=4 + ("e" in rows[0]), title=title)
    for row in rows:
        best.add(*row.values())
    return best


def _row(candidate: Candidate) -> dict[str, str]:
    job, parallel, rates = candidate.job, candidate.job.parallel, throughput(candidate.job, candidate.step_s)
    return {
        **({} if job.model.experts is None else {"e": str(parallel.expert)}),
        "t": str(parallel.tensor),
        "c": str(parallel.context),
        "p": str(parallel.pipeline),
        "d": str(job.replicas),
        "layers per chunk": "-" if job.chunks == 1 else str(parallel.layers_per_chunk),
        "SP": "yes" if parallel.sequence_parallel else "no",
        "micro": str(job.batch.micro),
        "policy": job.policy,
        "offload": f"{candidate.offload_ratio:g}",
        "step": format_seconds(candidate.step_s),
        "tokens/s": f"{rates['tokens_per_s']:.0f}",
        "MFU": f"{rates['mfu']:.1%}",
        "memory": format_bytes(candidate.memory_bytes),
        "budget": format_bytes(job.memory_budget_bytes),
    }


def nothing_fits(space: Space, policies: Sequence[Policy], unfit: Sequence[Job] = ()) -> Infeasible:
    """`unfit`: candidates whose state fits. Without any, the smallest states are tried."""
    known = [policy for policy in policies if policy in STOCK] or policies  # their memory is known at once
    tried = [(job, *least_memory(job)) for job in unfit or _under(known, _by_state(space)[:32])]
    over_bytes = [memory.total - job.memory_budget_bytes for job, _, memory, _ in tried]
    closest = min(range(len(tried)), key=lambda at: (over_bytes[at] <= 0, over_bytes[at]))
    job, stage, memory, of_host = tried[closest]
    short = [*shortages(job, [(stage, memory)]), *filter(None, [of_host])]
    devices = "1 device" if space.gpus == 1 else f"{space.gpus} devices"
    headline = f"nothing fits on {devices}: the closest is {in_words(job)}"
    return Infeasible(headline, [*short, *_changes(space, policies, job, memory.total / GIB)])


def least_memory(job: Job) -> tuple[int, StageMemory, Problem | None]:
    """Return the fullest stage, its memory, and the shortage of the host if there is one. A plan recomputes and offloads
    everything that can be."""
    stages, host_bytes = tuple(held(job)), 0
    if job.policy == "planned":
        solved = Stages(job, analytic_profile(job))
        least = [solved.least(stage) for stage in range(job.parallel.pipeline)]
        pairs = ((most_beside_layers(job, answer.stage), answer.peak_bytes) for answer in least)
        stages = tuple(replace(beside, activations=beside.activations + layers_bytes) for beside, layers_bytes in pairs)
        host_bytes = max(answer.host_bytes for answer in least)
    stage = max(range(len(stages)), key=lambda stage: stages[stage].total)
    return stage, stages[stage], host_shortage(job, host_bytes)


def _changes(space: Space, policies: Sequence[Policy], closest: Job, used_gib: float) -> Iterator[Problem]:
    others = tuple(policy for policy in POLICIES if policy not in policies)
    if others and (solution := _smallest_that_fits(space, others)) is not None:
        yield Problem("--policies", ", ".join(policies), solution.policy, _then(solution))
    budget_gib = closest.memory_budget_bytes / GIB
    if budget_gib < used_gib < closest.cluster.memory_gib:
        yield Problem("budget.memory_gib", f"{budget_gib:.2f}", f"{used_gib:.2f}", f"then {in_words(closest)} fits")
    for times in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        more = replace(space, gpus=times * space.gpus)
        if (solution := _smallest_that_fits(more, policies)) is not None:
            yield Problem("--gpus", str(space.gpus), str(more.gpus), _then(solution))
            return


def _then(job: Job) -> str:
    return f"then {in_words(job)} fits: {format_bytes(max(memory.total for memory in held(job)))}"


def _smallest_that_fits(space: Space, policies: Sequence[Policy]) -> Job | None:
    """Return the fitting layout with the smallest state and micro-batch."""
    states_fit = takewhile(lambda job: always_bytes(job) <= job.memory_budget_bytes, _by_state(space))
    return next(filter(fits, _under(policies, states_fit)), None)


def _by_state(space: Space) -> list[Job]:
    return sorted((jobs[0] for jobs in space.layouts()), key=always_bytes)


def _under(policies: Sequence[Policy], jobs: Iterable[Job]) -> Iterator[Job]:
    return (job.model_copy(update={"policy": policy}) for job in jobs for policy in policies)


TOKENS_OF_A_BATCH = 4 * 2**20


def batch_of(seq: int, gpus: int) -> int:
    """Sequences of `TOKENS_OF_A_BATCH`, a multiple of the devices."""
    return max(1, round(TOKENS_OF_A_BATCH / seq / gpus)) * gpus


def smallest_layout(job: Job) -> Job:
    """Return the job in the fitting layout with the fewest ranks per replica, under the first policy with one.

    Raises `Infeasible` if nothing fits.
    """
    space = Space(job, job.gpus, contexts=(1,))
    jobs = sorted((jobs[0] for jobs in space.layouts() if jobs[0].chunks == 1), key=_size)
    smallest = next(filter(fits, chain.from_iterable(_under([policy], jobs) for policy in STOCK)), None)
    if smallest is None:
        raise nothing_fits(space, STOCK)
    return smallest


def _size(job: Job) -> tuple[int, ...]:
    layout = job.parallel
    return layout.ranks, layout.pipeline, layout.expert, not layout.sequence_parallel
