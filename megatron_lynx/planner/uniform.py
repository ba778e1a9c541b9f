"""Plans that recompute the same items in every layer, on demand: for comparison, and as a template. They need no profile."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Job
from megatron_lynx.cost.recompute import recomputed_flops
from megatron_lynx.plan.plan import Plan, Predicted, Stage
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.planner.writing import plan_of, rule_of, stage_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.solver.options import stays_whole


def uniform_plan(job: Job, recompute: Literal["all", "none"] | Collection[str] = "all") -> Plan:
    """Return a plan that recomputes these items in every layer that has them.

    `all`: all that are allowed, but linear_qkv and linear_fc1 only if they gather no input. If these are named, their input is
    gathered once.
    """
    check_plannable(job)
    sliced, items = job.parallel.sequence_parallel, set[str]() if isinstance(recompute, str) else set(recompute)
    for section in job.model.every_section if recompute == "all" else ():
        gathered = (section.gathered,) if sliced or job.keeps_gathered else ()
        items |= {*section.recomputable_among(job.parallel.context, sequence_parallel=sliced)}.difference(gathered)
    return plan_of(job, lambda where: _stage(job, where, items))


def _stage(job: Job, where: tuple[int, int], items: Collection[str]) -> Stage:
    rules, flops = [], 0
    for layer in job.layers_of(*where):
        sections = job.model.sections(layer)
        names = (set(section.names).difference(section.apart) for section in sections if not stays_whole(job, section))
        some = set[str]().union(*names).intersection(items)
        halves = {section.half: section.gathered for section in sections if some.intersection(section.names)}
        gathers = {half: ON_DEMAND for half, gathered in halves.items() if job.parallel.sequence_parallel and gathered in some}
        rules.append(rule_of(layer, sections, some, dict.fromkeys(halves, ON_DEMAND), gathers))
        flops += recomputed_flops(LayerShape.of(job), some, sections)
    return stage_of(job, where, rules, Predicted(recomputed_flops=flops))
