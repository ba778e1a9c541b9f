"""Plans that treat every layer alike and need no profile: for comparison, and as a template."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from megatron_lynx.anatomy import Half, Section, all_items
from megatron_lynx.anatomy.address import (
    ON_DEMAND,
    RECV_BACKWARD,
    amax_reducing,
    own_waits_in_time,
    own_window,
    window_name,
)
from megatron_lynx.config.job import Job
from megatron_lynx.cost.recompute import recomputed_flops
from megatron_lynx.plan.facts import Provenance
from megatron_lynx.plan.plan import Plan, Predicted, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.planner.checks import check_plannable
from megatron_lynx.planner.writing import exchanging_layers, made_by, plan_of, rule_of, stage_of
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.solver.options import stays_whole

Before = tuple[int, Section] | None
"""Layer and section of the half with windows whose backward comes before another's; None at the end of a chunk."""


def uniform_plan(
    job: Job,
    recompute: Literal["all", "none"] | Collection[str] = "all",
    *,
    windows: bool = True,
    gather: Literal["keep", "once"] = "keep",
) -> Plan:
    """Return a plan that recomputes the items of `recompute` in every layer; `all`: all that are allowed.

    With `windows` each half is recomputed in its usual window, else on demand. Under sequence parallelism, `gather` decides
    whether linear_qkv and linear_fc1 are kept, or recomputed from an input that is gathered once. With userbuffers they are kept,
    and only messages between stages are windows; with overlapped exchanges of experts there are no windows.
    """
    check_plannable(job)
    sliced = job.parallel.sequence_parallel
    known = job.model.every_section
    recomputable = [
        item for section in known for item in section.recomputable_among(job.parallel.context, sequence_parallel=sliced)
    ]
    asked = recomputable if recompute == "all" else () if recompute == "none" else recompute
    items = tuple(item for item in all_items() if item in asked)
    if sliced or job.keeps_gathered:
        kept = [section.gathered for section in known if gather == "keep" or job.keeps_gathered or not section.has_windows]
        items = tuple(item for item in items if item not in kept)
    places = ((stage, chunk) for chunk in range(job.chunks) for stage in range(job.parallel.pipeline))
    stages = tuple(_uniform_stage(job, stage, chunk, items, windows and not job.model.moe_overlapped) for stage, chunk in places)
    return plan_of(job, stages, Provenance(made_by=made_by(), job=job.digest))


def _uniform_stage(job: Job, stage: int, chunk: int, items: Collection[str], ahead: bool) -> Stage:
    layers, shape = job.layers_of(stage, chunk), LayerShape(job.model, job.parallel, job.batch.micro)
    halves = [(layer, section) for layer in layers for section in job.model.sections(layer)]
    later = (halves[at + 1 :] for at in range(len(halves)))  # backward runs from the last to the first
    befores = [next((half for half in rest if half[1].has_windows), None) for rest in later]
    rules, flops = [], 0
    for layer in layers:
        layer_halves = [(section, before) for (at, section), before in zip(halves, befores, strict=True) if at == layer]
        recomputed = [section for section, _ in layer_halves if not stays_whole(job, section)]
        some = [item for item in items if any(item in section.names and item not in section.apart for section in recomputed)]
        rules.append(_uniform_rule(job, (stage, chunk), layer, some, layer_halves, ahead))
        flops += recomputed_flops(shape, some, job.model.sections(layer))
    return stage_of(job, (stage, chunk), rules, Predicted(recomputed_flops=flops))


def _uniform_rule(
    job: Job, where: tuple[int, int], layer: int, items: Collection[str], halves: Sequence[tuple[Section, Before]], ahead: bool
) -> Rule:
    windows: dict[Half, str | None] = {}
    gathers: dict[Half, str | None] = {}
    for section, before in halves:
        if not set(items) & set(section.names):
            continue
        gathers_once = job.parallel.sequence_parallel and section.gathered in items
        reducing = amax_reducing(section, items, job.model.fp8_recipe, sequence_parallel=job.parallel.sequence_parallel)
        hidden = ahead and not reducing and not (before is None and gathers_once)
        windows[section.half] = _usual_window(job, where, (layer, section), items, before) if hidden else ON_DEMAND
        if gathers_once:
            gathers[section.half] = _window_before(layer, before, 0) if hidden and before else ON_DEMAND
    return rule_of(layer, job.model.sections(layer), items, windows, gathers)


def _window_before(layer: int, before: tuple[int, Section], ordinal: int) -> str:
    at, section = before
    return window_name("bwd", section.half, ordinal, at - layer)


def _usual_window(job: Job, where: tuple[int, int], frame: tuple[int, Section], items: Collection[str], before: Before) -> str:
    (layer, section), parallel = frame, job.parallel
    gathers_once = parallel.sequence_parallel and section.gathered in items
    exchanged, sliced = layer in exchanging_layers(job) and not job.userbuffers, parallel.sequence_parallel
    in_time = own_waits_in_time(section, items, exchanged=exchanged, sequence_parallel=sliced, te=job.model.uses_te)
    if in_time and (section.exchanges or not (gathers_once or job.no_windows)):
        return own_window(section.half)
    if before is not None:
        last = len(before[1].collectives("bwd", parallel.sequence_parallel)) - 1
        return ON_DEMAND if job.no_windows or parallel.tensor == 1 else _window_before(layer, before, last)
    stage, chunk = where
    lies_there = chunk == job.chunks - 1 or job.microbatch_group > parallel.pipeline
    return ON_DEMAND if stage == parallel.pipeline - 1 and lies_there else RECV_BACKWARD
