"""Plans that defer weight gradients, made of others: into every wait that there is, or into chosen ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from megatron_lynx.anatomy import HALVES, PASSES, Pass
from megatron_lynx.anatomy.address import RECV_BACKWARD, window_name
from megatron_lynx.plan import weight_gradients
from megatron_lynx.plan.plan import Plan, Rule, Stage, WeightGradients
from megatron_lynx.plan.timetables import timetable_of

PLENTY = 1 << 30


def deferring(
    plan: Plan, linears: Sequence[str] = (), chosen: Callable[[str], bool] = lambda wait: True, most_bytes: int = PLENTY
) -> Plan:
    """The same plan, in which these linears, or all, defer theirs into those of the chosen waits that come for them."""
    return plan.with_stages(_stage(plan, stage, linears, chosen, most_bytes) for stage in plan.stages)


def _stage(plan: Plan, stage: Stage, linears: Sequence[str], chosen: Callable[[str], bool], most_bytes: int) -> Stage:
    rules = []
    for rule in stage.rules:
        waits = {}
        for linear in linears or [linear for half in HALVES for linear in plan.model.halves[half].linears]:
            if some := tuple(wait for wait in _waits(plan) if chosen(wait) and _comes(plan, stage, rule, linear, wait)):
                waits[linear] = some
        rules.append(rule.model_copy(update={"weight_gradients": waits}))
    bound = WeightGradients(bytes=most_bytes) if any(rule.weight_gradients for rule in rules) else None
    return stage.model_copy(update={"rules": tuple(rules), "weight_gradients": bound})


def _comes(plan: Plan, stage: Stage, rule: Rule, linear: str, wait: str) -> bool:
    asked = rule.model_copy(update={"weight_gradients": {linear: (wait,)}})
    return not list(weight_gradients.problems(plan, stage, asked, timetable_of(plan, stage.stage)))


def _waits(plan: Plan) -> Iterator[str]:
    yield RECV_BACKWARD
    sliced = plan.parallel.sequence_parallel
    passes: tuple[Pass, ...] = PASSES
    for passing in passes:
        for half in HALVES:
            for ordinal in range(len(plan.model.halves[half].collectives(passing, sliced))):
                yield from (window_name(passing, half, ordinal, above) for above in (0, 1, -1))
