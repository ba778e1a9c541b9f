"""Makes the timetable of each stage of a plan, and lists the norms that run during communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megatron_lynx.anatomy import Section
from megatron_lynx.anatomy.address import ON_DEMAND, Stretch, window_at
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.plan.rule import Rule
from megatron_lynx.timetable import Layout, PlannedHalf, Timetable, ahead_to, may_gather_ahead

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
    checkpoint, behind, gather = rule.checkpoints(half), rule.fed_behind(layer, half), rule.gather.of(half)
    stretches = (Stretch(ON_DEMAND),) if behind else rule.windows.stretches(half)
    return PlannedHalf(
        layer,
        section,
        section.run_again(whole=behind > 0) if checkpoint else rule.recomputed_in(half),
        tuple((window_at(stretch.window, layer), stretch.until) for stretch in stretches),
        None if gather is None else window_at(gather, layer),
        deferred,
        pieces,
        checkpoint=checkpoint,
        fed_behind=behind,
        ahead_to=ahead_to(section, experts=experts, feeds=behind > 0) if checkpoint and rule.ahead else None,
        gathers_ahead=rule.gathers_ahead and may_gather_ahead(section, experts=experts, feeds=behind > 0),
    )


def norms_in_windows(plan: Plan) -> tuple[str, ...]:
    """The norms over whole rows that are recomputed in windows. The norm of a gathered input runs at the gather instead."""
    norms = {
        half.section.norm
        for stage in plan.stages
        for half in planned_halves(stage, plan.model.sections_of)
        if half.section.norm in half.recompute and not half.checkpoint
        if half.gathered is None and half.stretches[0][0] != ON_DEMAND
    }
    return tuple(sorted(norms))
