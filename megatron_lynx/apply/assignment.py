"""From a plan to what the runtime follows: a policy for every half, an agenda of windows, and the order in which passes run."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from megatron_lynx.apply.site import LAYOUTS
from megatron_lynx.items import HALVES, Half
from megatron_lynx.plan.order import PHASES, frames_of, gather_of, window_of
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.runtime.ledger import Order
from megatron_lynx.runtime.policy import HalfPolicy
from megatron_lynx.runtime.turns import Turn, Turns
from megatron_lynx.runtime.window import Agenda, FrameKey, Place, WindowKey
from megatron_lynx.schedule.one_stage import passes_of
from megatron_lynx.schedule.windows import ON_DEMAND, RECV_BACKWARD, Collective, Window


def policies(plan: Plan, stage: Stage, gather: Callable[[Any], Any]) -> dict[int, dict[Half, HalfPolicy]]:
    """The policy of every half, by layer number."""
    return {layer: {half: _policy(plan, stage, layer, half, gather) for half in HALVES} for layer in stage.layers}


def _policy(plan: Plan, stage: Stage, layer: int, half: Half, gather: Callable[[Any], Any]) -> HalfPolicy:
    layout, replayed = LAYOUTS[half], frozenset(stage.rule_for(layer).replays(half))
    gathers = plan.parallel.sequence_parallel and layout.column_parallel in replayed
    return HalfPolicy(
        layer=layer,
        half=half,
        replay=replayed,
        code_behind=layout.code_behind,
        row_parallel=layout.row_parallel,
        gather_site=layout.column_parallel if gathers else None,
        gather=gather if gathers else None,
        chunk=stage.chunk,
        opaque=half == "mlp" and plan.model.has_experts(layer),
    )


def agenda(stage: Stage) -> Agenda:
    """Which frames of a chunk run in which window, by phase. Frames of one window run in the order in which backward needs
    them."""
    replays: dict[Any, dict[WindowKey, tuple[FrameKey, ...]]] = {phase: {} for phase in PHASES}
    gathers: dict[WindowKey, tuple[FrameKey, ...]] = {}
    for frame in frames_of(stage):
        for phase in PHASES:
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


def _assign(table: dict[WindowKey, tuple[FrameKey, ...]], window: Window, frame: FrameKey) -> None:
    if window == ON_DEMAND:
        return
    key: WindowKey = RECV_BACKWARD
    if isinstance(window, Collective):
        key = Place(window.passing, window.layer, window.half, window.ordinal)
    table[key] = (*table.get(key, ()), frame)


def order_of(pipeline: int, stage: int, chunks: int, group_size: int) -> Order:
    """What a stage does in a step, by the number of micro-batches.

    `group_size`: Megatron's `microbatch_group_size_per_vp_stage`.
    """

    @lru_cache(maxsize=8)
    def order(microbatches: int) -> Turns:
        passes = passes_of(pipeline, stage, microbatches, chunks, group_size)
        return Turns([Turn(action.kind, action.micro_batch, action.chunk, phase) for action, phase in passes])  # type: ignore[arg-type]

    return order
