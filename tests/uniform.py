"""Plans that treat every layer alike, with each half recomputed in its usual window."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Literal

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, amax_reducing, own_waits_in_time, own_window, window_name
from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.planner import uniform_plan as on_demand
from megatron_lynx.planner.writing import exchanging_layers, rule_of, stage_of

Before = tuple[int, Section] | None
"""Layer and section of the half with windows whose backward comes before another's; None at the end of a chunk."""


def uniform_plan(
    job: Job,
    recompute: Literal["all", "none"] | Collection[str] = "all",
    *,
    windows: bool = True,
    gather: Literal["keep", "once"] = "keep",
) -> Plan:
    """A plan that recomputes the items of `recompute` in every layer; `all`: all that are allowed.

    With `windows` each half is recomputed in its usual window, else on demand. Under sequence parallelism, `gather` decides
    whether linear_qkv and linear_fc1 are kept, or recomputed from an input that is gathered once. With userbuffers they are kept,
    and only messages between stages are windows; with overlapped exchanges of experts there are no windows.
    """
    known, sliced = job.model.every_section, job.parallel.sequence_parallel
    if recompute == "all" and gather == "once":
        allowed = (section.recomputable_among(job.parallel.context, sequence_parallel=sliced) for section in known)
        recompute = tuple(chain.from_iterable(allowed))
    if not isinstance(recompute, str) and (sliced or job.keeps_gathered):
        kept = {section.gathered for section in known if gather == "keep" or job.keeps_gathered or not section.has_windows}
        recompute = tuple(item for item in recompute if item not in kept)
    plan = on_demand(job, recompute)
    if not windows or job.model.moe_overlapped:
        return plan
    return plan.model_copy(update={"stages": tuple(_in_windows(job, entry) for entry in plan.stages)})


def _in_windows(job: Job, entry: Stage) -> Stage:
    halves = [(layer, section) for layer in entry.layers for section in job.model.sections(layer)]
    later = (halves[at + 1 :] for at in range(len(halves)))  # backward runs from the last to the first
    befores = [next((half for half in rest if half[1].has_windows), None) for rest in later]
    rules = []
    for layer in entry.layers:
        own = [(section, before) for (at, section), before in zip(halves, befores, strict=True) if at == layer]
        items = {item for section, _ in own for item in entry.rule_for(layer).recomputed(section)}
        rules.append(_rule(job, (entry.stage, entry.chunk), layer, items, own))
    return stage_of(job, (entry.stage, entry.chunk), rules, entry.predicted)


def _rule(job: Job, where: tuple[int, int], layer: int, items: Collection[str], halves: Sequence[tuple[Section, Before]]) -> Rule:
    windows: dict[Half, str | None] = {}
    gathers: dict[Half, str | None] = {}
    for section, before in halves:
        if not set(items) & set(section.names):
            continue
        gathers_once = job.parallel.sequence_parallel and section.gathered in items
        reducing = amax_reducing(section, items, job.model.fp8_recipe, sequence_parallel=job.parallel.sequence_parallel)
        hidden = not reducing and not (before is None and gathers_once)
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
