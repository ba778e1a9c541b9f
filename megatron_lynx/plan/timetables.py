"""From a plan to the timetable of each of its stages (`timetable`), which says what runs when.

stages[k].rules ──layer by layer──> PlannedHalf, PlannedHalf, ... ──all chunks of a stage──> Timetable
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from megatron_lynx.anatomy import Section
from megatron_lynx.anatomy.address import BACKWARD_PHASES, window_at
from megatron_lynx.plan.contents import PlanContents
from megatron_lynx.plan.rule import Rule
from megatron_lynx.plan.stage import Stage
from megatron_lynx.timetable import Layout, Place, PlannedHalf, Timetable

SectionsOf = Callable[[int], Iterable[Section]]
"""What fills the halves of a layer, in the order of a forward."""


def timetable_of(plan: PlanContents, stage: int) -> Timetable:
    """The timetable of one stage, its chunks by number."""
    chunks = [tuple(planned_halves(entry, plan.model.sections_of)) for entry in plan.chunks_of(stage)]
    return Timetable(chunks, layout_of(plan))


def layout_of(plan: PlanContents) -> Layout:
    return Layout(plan.parallel.tensor > 1, plan.parallel.sequence_parallel, plan.exchanging)


def planned_halves(stage: Stage, sections_of: SectionsOf) -> Iterator[PlannedHalf]:
    """The halves of a stage's entry in the order of a forward, each as its rule has it."""
    for layer in stage.layers:
        rule = stage.rule_for(layer)
        yield from (_planned(rule, layer, section) for section in sections_of(layer))


def _planned(rule: Rule, layer: int, section: Section) -> PlannedHalf:
    half = section.half
    replay = rule.replays(half)
    deferred = {
        linear: tuple(window_at(wait, layer) for wait in rule.weight_gradients[linear])
        for linear in (reversed(section.linears) if rule.weight_gradients else ())
        if linear in rule.weight_gradients
    }
    if not replay:
        return PlannedHalf(layer, section, deferred=deferred)
    steady, cooldown = (
        Place(
            tuple((window_at(stretch.window, layer), stretch.until) for stretch in rule.windows.stretches(half, phase)),
            None if (gather := rule.gather.of(half, phase)) is None else window_at(gather, layer),
        )
        for phase in BACKWARD_PHASES
    )
    return PlannedHalf(layer, section, replay, steady, cooldown, deferred)
