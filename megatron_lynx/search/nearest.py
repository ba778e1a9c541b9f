"""If nothing fits: the closest layout, and the smallest changes after which one fits. And the smallest layout that fits.

closest      of all layouts and policies, the stage that is least over its budget
changes      one line for each that alone is enough: other policies, offloading, a larger budget, more devices
smallest     for a job that states only model, cluster and devices: the fewest ranks per replica under the first policy that fits,
             without context parallelism, one chunk, micro-batch 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_lynx.config.job import Job, Policy
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.stage_memory import always_bytes
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.search.candidate import Excess, Fits, fit, in_words
from megatron_lynx.search.space import Space
from megatron_lynx.units import GIB, format_bytes

TIMES_AS_MANY = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

STATES_TRIED = 32
"""Layouts with the smallest states that are tried if no state fits."""


@dataclass(frozen=True)
class Asked:
    space: Space
    policies: Sequence[Policy]
    offload: bool


def nothing_fits(asked: Asked, excesses: Sequence[Excess], known: Sequence[Policy]) -> Infeasible:
    """`excesses`: those of candidates whose state fits. `known`: all policies."""
    closest = min(excesses or _of_small_states(asked), key=lambda excess: (excess.bytes <= 0, excess.bytes))
    devices = "1 device" if asked.space.gpus == 1 else f"{asked.space.gpus} devices"
    headline = f"nothing fits on {devices}: the closest is {in_words(closest.job)}"
    return Infeasible(headline, [_binding(closest, asked.offload), *_changes(asked, closest, known)])


def _of_small_states(asked: Asked) -> list[Excess]:
    jobs = _by_state(asked.space)[:STATES_TRIED]
    tried = (fit(_under(job, policy), asked.offload) for job in jobs for policy in asked.policies)
    return [result for result in tried if isinstance(result, Excess)]


def _binding(closest: Excess, offload: bool) -> Problem:
    limit = f"at most {format_bytes(closest.limit)}"
    if closest.host:
        return Problem("host memory of a node", f"{format_bytes(closest.usage)} to be offloaded", limit)
    offloaded = ", with all activations offloaded that may be" if offload else ""
    usage = f"{format_bytes(closest.usage)}, most of it {closest.largest_part}{offloaded}"
    return Problem(f"stage {closest.stage}", usage, limit, f"{format_bytes(closest.bytes)} too much")


def _changes(asked: Asked, closest: Excess, known: Sequence[Policy]) -> Iterator[Problem]:
    other_policies = tuple(policy for policy in known if policy not in asked.policies)
    if other_policies and (solution := first_that_fits(replace(asked, policies=other_policies))) is not None:
        yield Problem("--policies", ", ".join(asked.policies), solution[0].policy, _then(*solution))
    if not asked.offload and (solution := first_that_fits(replace(asked, offload=True))) is not None:
        yield Problem("--no-offload", "no offloading", f"offload ratio {solution[1].offload_ratio:g}", _then(*solution))
    if not closest.host and closest.usage < closest.job.cluster.memory_gib * GIB:
        needed = f"{closest.usage / GIB:.2f}"
        yield Problem("budget.memory_gib", f"{closest.limit / GIB:.2f}", needed, f"then {in_words(closest.job)} fits")
    for times in TIMES_AS_MANY:
        more = replace(asked, space=replace(asked.space, gpus=times * asked.space.gpus))
        if (solution := first_that_fits(more)) is not None:
            yield Problem("--gpus", str(asked.space.gpus), str(more.space.gpus), _then(*solution))
            return


def _then(job: Job, fits: Fits) -> str:
    offloaded = f", offload ratio {fits.offload_ratio:g}" if fits.offload_ratio else ""
    return f"then {in_words(job)} fits{offloaded}: {format_bytes(fits.memory.total)}"


def first_that_fits(asked: Asked) -> tuple[Job, Fits] | None:
    """Return the fitting layout with the smallest state and micro-batch. It need not be the fastest."""
    for job in _by_state(asked.space):
        if always_bytes(job) > job.memory_budget_bytes:
            return None
        for policy_job in (_under(job, policy) for policy in asked.policies):
            if isinstance(fits := fit(policy_job, asked.offload), Fits):
                return policy_job, fits
    return None


def _by_state(space: Space) -> list[Job]:
    """One job for each layout, smallest state first."""
    jobs: Iterable[Job] = (next(space.on(parallel)) for parallel in space.layouts())
    return sorted(jobs, key=always_bytes)


def _under(job: Job, policy: Policy) -> Job:
    return job.model_copy(update={"policy": policy})


STOCK_POLICIES: tuple[Policy, ...] = ("none", "selective", "full")
TOKENS_OF_A_BATCH = 4 * 2**20
"""4 million tokens, as for large models."""


def batch_of(seq: int, gpus: int) -> int:
    """Sequences of `TOKENS_OF_A_BATCH`, a multiple of the devices."""
    return max(1, round(TOKENS_OF_A_BATCH / seq / gpus)) * gpus


def smallest_layout(job: Job) -> Job:
    """Return the job in the fitting layout with the fewest ranks per replica, under the first policy with one.

    Raises `Infeasible` if nothing fits.
    """
    space = Space(job, job.gpus, contexts=(1,))
    jobs = [next(space.on(layout)) for layout in sorted(space.layouts(), key=_size) if layout.layers_per_chunk is None]
    for policy in STOCK_POLICIES:
        for one in jobs:
            tried = one.model_copy(update={"policy": policy})
            if isinstance(fit(tried, offload=False), Fits):
                return tried
    raise nothing_fits(Asked(space, STOCK_POLICIES, offload=False), (), STOCK_POLICIES)


def _size(layout: Parallel) -> tuple[int, ...]:
    return layout.ranks, layout.pipeline, layout.expert, not layout.sequence_parallel
