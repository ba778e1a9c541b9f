"""Answers nobody has to search for, to compare with: keep everything, replay everything, and any answer without its windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_lynx.schedule.windows import ON_DEMAND
from megatron_lynx.solver.answer import LayerChoice, Solved
from megatron_lynx.solver.problem import ON_DEMAND_SEAT, Option, StageProblem


def keep_all(problem: StageProblem) -> Solved:
    """No recomputation."""
    return _everywhere(problem, lambda options: min(options, key=lambda option: len(option.replay)))


def replay_all(problem: StageProblem) -> Solved:
    """Everything replayable replayed, each half in its window. It exposes no less than the solver's answer of equal memory."""
    return _everywhere(problem, lambda options: max(options, key=lambda option: len(option.replay)))


def on_demand(solved: Solved) -> Solved:
    """The same kept sets, every replay exposed."""
    layers = [LayerChoice(_exposed(layer.attention), _exposed(layer.mlp)) for layer in solved.layers]
    return replace(solved, layers=tuple(layers))


def _exposed(option: Option) -> Option:
    seat = replace(ON_DEMAND_SEAT, gather=option.seat.gather and ON_DEMAND, gather_s=option.seat.gather_s)
    return replace(option, seat=seat, exposed_s=option.replay_s + seat.gather_s, memory=replace(option.memory, ahead=0))


def _everywhere(problem: StageProblem, choose: Callable[[Sequence[Option]], Option]) -> Solved:
    usual = LayerChoice(choose(problem.attention), choose(problem.mlp))
    last = LayerChoice(usual.attention, choose(problem.last_mlp))
    return Solved((usual,) * (problem.layers - 1) + (last,), problem.in_flight)
