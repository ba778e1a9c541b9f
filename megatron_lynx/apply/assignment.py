"""From a plan to what the runtime follows: a policy for every half, an agenda of windows, and the order in which passes run."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from megatron_lynx.anatomy import Half, Section, sections_of
from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, FrameKey, Window
from megatron_lynx.plan.order import frames_of, gather_of, window_of
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.runtime.ledger import Order
from megatron_lynx.runtime.policy import HalfPolicy
from megatron_lynx.runtime.turns import Turn, Turns
from megatron_lynx.runtime.window import Agenda
from megatron_lynx.schedule.one_stage import passes_of


def policies(plan: Plan, stage: Stage, gather: Callable[[Any], Any]) -> dict[int, dict[Half, HalfPolicy]]:
    """The policy of every half, by layer number."""
    return {
        layer: {
            section.half: _policy(plan, stage, layer, section, gather)
            for section in sections_of(experts=plan.model.has_experts(layer))
        }
        for layer in stage.layers
    }


def _policy(plan: Plan, stage: Stage, layer: int, section: Section, gather: Callable[[Any], Any]) -> HalfPolicy:
    replayed = frozenset(stage.rule_for(layer).replays(section.half))
    gathers = plan.parallel.sequence_parallel and not section.opaque and section.column_parallel in replayed
    return HalfPolicy(
        layer=layer,
        section=section,
        replay=replayed,
        gather_site=section.column_parallel if gathers else None,
        gather=gather if gathers else None,
        chunk=stage.chunk,
    )


def agenda(stage: Stage) -> Agenda:
    """Which frames of a chunk run in which window, by phase. Frames of one window run in the order in which backward needs
    them."""
    replays: dict[Any, dict[Window, tuple[FrameKey, ...]]] = {phase: {} for phase in BACKWARD_PHASES}
    gathers: dict[Window, tuple[FrameKey, ...]] = {}
    for frame in frames_of(stage):
        for phase in BACKWARD_PHASES:
            _assign(replays[phase], window_of(stage, frame, phase), frame)
        behind = gather_of(stage, frame)
        if behind is not None:
            _assign(gathers, behind, frame)
    return Agenda(
        replays=replays,
        gathers=gathers,
        ahead_depth=stage.ahead_depth,
        whole=stage.whole or (),
        first_layer=stage.layers.first,
    )


def _assign(table: dict[Window, tuple[FrameKey, ...]], window: Window, frame: FrameKey) -> None:
    if window == ON_DEMAND:
        return
    table[window] = (*table.get(window, ()), frame)


def order_of(pipeline: int, stage: int, chunks: int, group_size: int) -> Order:
    """What a stage does in a step, by the number of micro-batches.

    `group_size`: Megatron's `microbatch_group_size_per_vp_stage`.
    """

    @lru_cache(maxsize=8)
    def order(microbatches: int) -> Turns:
        passes = passes_of(pipeline, stage, microbatches, chunks, group_size)
        return Turns([Turn(action.kind, action.micro_batch, action.chunk, phase) for action, phase in passes])  # type: ignore[arg-type]

    return order
