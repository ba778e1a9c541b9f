"""Micro-batches that keep everything: recomputation by micro-batch (Korthikanti et al., 2205.05198, appendix C).

    in flight, N = 4     whole  whole  replaying  replaying     k = 2
    exposed seconds, mean of all      (1 - k/N) x those of a replaying one
    bytes                             k x all  +  (N - k) x resident  +  the frame of one that replays

k whole ones leave a smaller budget for the others, which then replay more: every k is tried, and the solver asked about the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_lynx.errors import Infeasible
from megatron_lynx.solver import sweep
from megatron_lynx.solver.answer import Solved, Solver, WholeMicroBatches
from megatron_lynx.solver.baselines import keep_all
from megatron_lynx.solver.problem import StageProblem


def with_whole_microbatches(problem: StageProblem, solve: Solver = sweep.solve) -> Solved:
    """The answer that exposes least in the mean; ties: the fewest whole micro-batches.

    Without a budget, or where a share of a micro-batch is in flight (offloading), there are none. Raises `Infeasible` as `solve`
    does.
    """
    answer = solve(problem)
    if problem.budget_bytes is None or problem.in_flight != int(problem.in_flight):
        return answer
    return min((answer, *_with_whole(problem, solve)), key=lambda answer: answer.longer_s)


def _with_whole(problem: StageProblem, solve: Solver) -> Iterator[Solved]:
    """An answer for every count of whole ones that leaves room for the others."""
    kept, in_flight, budget_bytes = keep_all(problem), int(problem.in_flight), problem.budget_bytes or 0
    whole_peak_bytes = replace(kept, in_flight=1).peak_bytes
    for count in range(1, in_flight):
        left = replace(problem, in_flight=in_flight - count, budget_bytes=budget_bytes - count * kept.resident_bytes)
        try:
            answer = solve(left)
        except Infeasible:
            return
        whole = WholeMicroBatches(count, in_flight, kept.resident_bytes, whole_peak_bytes)
        mixed = replace(answer, in_flight=in_flight, whole=whole, gap=None)
        if mixed.peak_bytes <= budget_bytes:
            yield mixed
