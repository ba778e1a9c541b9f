"""Named recomputation policies, for comparison.

none        keep everything
selective   recompute the core attention on demand (stock: `--recompute-granularity selective`, where attention is unfused)
balanced    recompute norms and the activation on demand: no GEMM, no attention (Yuan et al., ATC '24)
full        recompute everything possible on demand

They describe these policies in our runtime. It never repeats a row-parallel GEMM and its reduction, and it keeps the input of
both halves of a layer, so `full` is faster than stock Megatron's and holds more. Code between submodules runs again as well:
`selective` recomputes the rotary embedding with the core attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Policy
from megatron_lynx.cost.recompute import recomputed_items
from megatron_lynx.solver.answer import Solved, layers_of
from megatron_lynx.solver.problem import Choices, Option, StageProblem
from megatron_lynx.solver.seats import ON_DEMAND_SEAT


def of_policy(problem: StageProblem, policy: Policy) -> Solved:
    """Return the answer of a policy, all recomputation on demand. Raises `KeyError` for `planned`."""
    if policy == "full":
        return on_demand(recompute_all(problem))
    items = set(recomputed_items(policy))
    known = ({item for option in choices.plain for item in option.recompute} for choices in problem.halves)
    return _solved(problem, [choices.recomputing(items & ever) for choices, ever in zip(problem.halves, known, strict=True)])


def keep_all(problem: StageProblem) -> Solved:
    return of_policy(problem, "none")


def recompute_all(problem: StageProblem) -> Solved:
    """Recompute everything possible, each half in the window of its backward that hides most."""
    *halves, last = problem.halves
    least_exposed = min(_most_recomputed(last), key=lambda option: option.exposed_s)
    return _solved(problem, [*(_most_recomputed(choices.best_seated)[0] for choices in halves), least_exposed])


def on_demand(solved: Solved) -> Solved:
    return replace(solved, layers=layers_of([_exposed(option) for option in solved.halves]))


def _exposed(option: Option) -> Option:
    seat = replace(ON_DEMAND_SEAT, gather=option.seat.gather and ON_DEMAND, gather_s=option.seat.gather_s)
    memory = replace(option.memory, ahead=(0, 0, 0, 0))
    return replace(option, seat=seat, exposed_s=option.recompute_s + seat.gather_s, memory=memory)


def _solved(problem: StageProblem, options: Sequence[Option]) -> Solved:
    return Solved(layers_of(options), problem.in_flight, loss_bytes=problem.loss_bytes)


def _most_recomputed(options: Choices) -> list[Option]:
    most_items = max(len(option.recompute) for option in options.plain)
    return [option for option in options.plain if len(option.recompute) == most_items]
