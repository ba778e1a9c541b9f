"""Makes the timetable of each stage of a plan, and lists the norms that run during communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import ON_DEMAND, window_at
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.timetable import ON_DEMAND_PLACE, Layout, Place, PlannedHalf, Timetable, ahead_to, may_gather_ahead

SectionsOf = Callable[[int], Iterable[Section]]


def timetable_of(plan: Plan, stage: int) -> Timetable:
    chunks = [tuple(planned_halves(entry, plan.model.sections_of)) for entry in plan.chunks_of(stage)]
    return Timetable(chunks, layout_of(plan))


def layout_of(plan: Plan) -> Layout:
    return Layout(plan.parallel.tensor > 1, plan.parallel.sequence_parallel, plan.exchanging)


def planned_halves(stage: Stage, sections_of: SectionsOf) -> Iterator[PlannedHalf]:
    for layer in stage.layers:
        rule, sections = stage.rule_for(layer), tuple(sections_of(layer))
        experts = any(section.exchanges for section in sections)
        yield from (_planned(rule, layer, section, experts) for section in sections)


def _planned(rule: Rule, layer: int, section: Section, experts: bool) -> PlannedHalf:
    half = section.half
    deferred = {
        linear: tuple(window_at(wait, layer) for wait in rule.weight_gradients[linear])
        for linear in (reversed(section.linears) if rule.weight_gradients else ())
        if linear in rule.weight_gradients
    }
    pieces = {linear: rule.weight_gradient_pieces[linear] for linear in deferred if linear in rule.weight_gradient_pieces}
    planned = partial(PlannedHalf, layer, section, deferred=deferred, pieces=pieces)
    if rule.checkpoints(half):
        behind = rule.fed_behind(layer, half)
        ahead = ahead_to(section, experts=experts, feeds=behind > 0) if rule.ahead else None
        gathers = rule.gathers_ahead and may_gather_ahead(section, experts=experts, feeds=behind > 0)
        place = ON_DEMAND_PLACE if behind else _place(rule, layer, half)
        again = planned(section.run_again(whole=behind > 0), place)
        return replace(again, checkpoint=True, fed_behind=behind, ahead_to=ahead, gathers_ahead=gathers)
    if not (recompute := rule.recomputed_in(half)):
        return planned()
    return planned(recompute, _place(rule, layer, half))


def _place(rule: Rule, layer: int, half: Half) -> Place:
    return Place(
        tuple((window_at(stretch.window, layer), stretch.until) for stretch in rule.windows.stretches(half)),
        None if (gather := rule.gather.of(half)) is None else window_at(gather, layer),
    )


def norms_in_windows(plan: Plan) -> tuple[str, ...]:
    """The norms over whole rows that are recomputed in windows. The norm of a gathered input runs at the gather instead."""
    norms = {
        half.section.norm
        for stage in plan.stages
        for half in planned_halves(stage, plan.model.sections_of)
        if half.section.norm in half.recompute and not half.checkpoint
        if half.place.gather is None and half.place.stretches[0][0] != ON_DEMAND
    }
    return tuple(sorted(norms))
