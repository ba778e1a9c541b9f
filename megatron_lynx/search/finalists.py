"""The candidates that a search shows, with the same figures as `plan` and `estimate`.

A search ranks plans by rehearsals of a few micro-batches, without weight gradients in waits. Finalists are planned as `plan` does
and ranked again; a stock policy without copies is priced as in all commands.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import LynxError
from megatron_lynx.planner import decide, figures_of
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.search.candidate import Candidate


def finalists(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return them fastest first, without those that cannot be planned after all."""
    priced = map(_priced, candidates)
    return tuple(sorted((each for each in priced if each is not None), key=lambda each: each.step_s))


def _priced(candidate: Candidate) -> Candidate | None:
    job = candidate.job
    if job.policy == "planned":
        return _planned(candidate)
    from megatron_lynx.stock import OF_POLICY, priced  # imports this package

    if job.policy not in OF_POLICY or job.schedule != "flush" or candidate.offload_ratio:
        return candidate
    profile = analytic_profile(job)
    price = priced(job, profile, OF_POLICY[job.policy])
    return replace(candidate, step_s=price.step_s + update_s(job, profile), memory_bytes=price.most_bytes)


def _planned(candidate: Candidate) -> Candidate | None:
    profile = analytic_profile(candidate.job)
    try:
        decision = decide(candidate.job, profile)
    except LynxError:
        return None
    figures = figures_of(decision.job, profile, decision.simulation)
    ratio = max(answer.offload_ratio for answer in decision.stages)
    return replace(candidate, step_s=figures.step_s, memory_bytes=figures.memory_bytes, offload_ratio=ratio)
