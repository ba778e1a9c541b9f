"""Answers that need no search, to compare with: the recomputation policies that have a name.

none        everything kept
selective   the core attention again, on demand (stock: `--recompute-granularity selective`, where attention is unfused)
balanced    norms and the activation again, on demand: no GEMM, no attention (Yuan et al., ATC '24)
full        everything that can be replayed, on demand
block       the same in the stage's first layers only (stock: `--recompute-method block`)

They are these policies as *our* runtime carries them out. It never runs a row-parallel GEMM and its reduction again, and keeps
the input of both halves of a layer, so its `full` is faster than stock Megatron's and holds more. Code between submodules runs
again on the way to what is replayed, so `selective` replays the rotary embedding with the core attention.

Recomputation by micro-batch (Korthikanti et al., 2205.05198, appendix C) mixes `none` with an answer that was searched for:

    in flight, N = 4     whole  whole  replaying  replaying     k = 2
    exposed seconds, mean of all      (1 - k/N) x those of a replaying one
    bytes                             k x all  +  (N - k) x resident  +  the frame of one that replays

k whole ones leave a smaller budget for the others, which then replay more: every k is tried, and the solver asked about the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Policy
from megatron_lynx.cost.layer import replayed_items
from megatron_lynx.errors import Infeasible
from megatron_lynx.solver import sweep
from megatron_lynx.solver.answer import LayerChoice, Solved, Solver, WholeMicroBatches, layers_of
from megatron_lynx.solver.placement import ON_DEMAND_SEAT
from megatron_lynx.solver.problem import Choices, Option, StageProblem


def of_policy(problem: StageProblem, policy: Policy) -> Solved:
    """The answer of a policy, every replay on demand. Raises `KeyError` for `planned`, which has to be solved for."""
    if policy == "full":
        return on_demand(replay_all(problem))
    items = set(replayed_items(policy))
    if problem.mixed is not None:
        chosen = [
            half.choices.replaying(items & _ever_replayed(half.choices) if half.usual else set()) for half in problem.mixed.halves
        ]
        return Solved(layers_of(chosen), problem.in_flight, loss_bytes=problem.loss_bytes)
    kinds = (problem.attention, problem.mlp, problem.last_mlp)
    return _everywhere(problem, *(choices.replaying(items & _ever_replayed(choices)) for choices in kinds))


def _ever_replayed(choices: Choices) -> set[str]:
    """The items that any of these choices replays."""
    return {item for option in choices.plain for item in option.replay}


def block(problem: StageProblem, count: int) -> Solved:
    """`full` in the first `count` layers of the stage, `none` in the others."""
    full, kept = on_demand(replay_all(problem)), keep_all(problem)
    return replace(kept, layers=full.layers[:count] + kept.layers[count:])


def keep_all(problem: StageProblem) -> Solved:
    """No recomputation."""
    return of_policy(problem, "none")


def replay_all(problem: StageProblem) -> Solved:
    """Everything replayable replayed, each half in the window of its backward that hides most of it."""
    if problem.mixed is not None:
        *halves, last = (half.choices for half in problem.mixed.halves)
        chosen = [*(_most_replayed(choices.best_seated)[0] for choices in halves), _least_exposed(_most_replayed(last))]
        return Solved(layers_of(chosen), problem.in_flight, loss_bytes=problem.loss_bytes)
    attention, mlp = (_most_replayed(kind.best_seated)[0] for kind in (problem.attention, problem.mlp))
    return _everywhere(problem, attention, mlp, _least_exposed(_most_replayed(problem.last_mlp)))


def on_demand(solved: Solved) -> Solved:
    """The same items kept, and every replay on demand."""
    return replace(solved, layers=layers_of([_exposed(option) for option in solved.halves]), gap=None)


def _exposed(option: Option) -> Option:
    seat = replace(ON_DEMAND_SEAT, gather=option.seat.gather and ON_DEMAND, gather_s=option.seat.gather_s)
    memory = replace(option.memory, early=0, ahead=(0, 0, 0, 0))
    return replace(option, seat=seat, exposed_s=option.replay_s + seat.gather_s, memory=memory, cooldown_memory=None)


def _everywhere(problem: StageProblem, attention: Option, mlp: Option, last_mlp: Option) -> Solved:
    below = (LayerChoice(attention, mlp),) * (problem.layers - 1)
    last = LayerChoice(problem.at_top(attention), last_mlp)
    return Solved((*below, last), problem.in_flight, loss_bytes=problem.loss_bytes)


def _least_exposed(options: Iterable[Option]) -> Option:
    return min(options, key=lambda option: option.exposed_s)


def _most_replayed(options: Choices) -> list[Option]:
    most = max(len(option.replay) for option in options.plain)
    return [option for option in options.plain if len(option.replay) == most]


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
