"""Plans that delay weight gradients into all waits that can take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_lynx.anatomy import HALVES, PASSES, Pass
from megatron_lynx.anatomy.address import RECV_BACKWARD, SEND_BACKWARD, window_name
from megatron_lynx.plan.consistency import deferral_problems
from megatron_lynx.plan.plan import Plan, Stage, WeightGradients
from megatron_lynx.plan.rule import Rule
from megatron_lynx.plan.timetables import timetable_of


def deferring(
    plan: Plan, linears: Sequence[str] = (), chosen: Callable[[str], bool] = lambda wait: True, most_bytes: int = 1 << 30
) -> Plan:
    """Return the plan with the weight gradients of `linears`, by default all, delayed into those of the chosen waits that can
    take them."""
    return plan.with_stages(_stage(plan, stage, linears, chosen, most_bytes) for stage in plan.stages)


def _stage(plan: Plan, stage: Stage, linears: Sequence[str], chosen: Callable[[str], bool], most_bytes: int) -> Stage:
    timetable = timetable_of(plan, stage.stage)
    deferrable = linears or [linear for half in HALVES for linear in plan.model.halves[half].linears]

    def comes(rule: Rule, linear: str, wait: str) -> bool:
        asked = rule.model_copy(update={"weight_gradients": {linear: (wait,)}})
        return not list(deferral_problems(plan, stage, asked, timetable))

    rules = []
    for rule in stage.rules:
        waits = {
            linear: tuple(wait for wait in _waits(plan) if chosen(wait) and comes(rule, linear, wait)) for linear in deferrable
        }
        waits = {linear: some for linear, some in waits.items() if some}
        rules.append(rule.model_copy(update={"weight_gradients": waits}))
    bound = WeightGradients(bytes=most_bytes) if any(rule.weight_gradients for rule in rules) else None
    return stage.model_copy(update={"rules": tuple(rules), "weight_gradients": bound})


def _waits(plan: Plan) -> Iterator[str]:
    yield RECV_BACKWARD
    sliced = plan.parallel.sequence_parallel
    passes: tuple[Pass, ...] = PASSES
    for passing in passes:
        for half in HALVES:
            for ordinal in range(len(plan.model.halves[half].collectives(passing, sliced))):
                yield from (window_name(passing, half, ordinal, above) for above in (0, 1, -1))
    yield SEND_BACKWARD
