"""What of a plan runs while something is communicated: which norms, and in which of Megatron's groups.

windows of replays, waits of weight gradients     tp    a collective of tensor-parallel ranks
                                                  ep    an exchange of tokens
                                                  pp    the receive of a gradient
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, Window, window_at
from megatron_lynx.plan.order import frames_of, gather_of, stretches_of
from megatron_lynx.plan.plan import Plan, Stage

Group = Literal["tp", "ep", "pp"]
"""A process group, by the name that Megatron's `--high-priority-stream-groups` has for it."""


def groups_waited_for(plan: Plan) -> tuple[Group, ...]:
    """The groups for whose communication a plan's work is waited in."""
    found = {_group(plan, window) for stage in plan.stages for window in _windows(stage) if window != ON_DEMAND}
    return tuple(group for group in get_args(Group) if group in found)


def norms_in_windows(plan: Plan) -> tuple[str, ...]:
    """The norms over whole rows that run again in windows. One before a gathered input runs where that is gathered: in none."""
    found = dict.fromkeys(
        norm
        for stage in plan.stages
        for frame in frames_of(stage)
        if (norm := _section(plan, *frame).norm) in stage.rule_for(frame[0]).replays(frame[1])
        for phase in BACKWARD_PHASES
        if gather_of(stage, frame, phase) is None and stretches_of(stage, frame, phase)[0][0] != ON_DEMAND
    )
    return tuple(sorted(found))


def _windows(stage: Stage) -> Iterator[Window]:
    for frame in frames_of(stage):
        for phase in BACKWARD_PHASES:
            yield from (window for window, _ in stretches_of(stage, frame, phase))
    for layer in stage.layers:
        for waits in stage.rule_for(layer).weight_gradients.values():
            yield from (window_at(wait, layer) for wait in waits)


def _group(plan: Plan, window: Window) -> Group:
    if isinstance(window, str):
        return "pp"
    return "ep" if _section(plan, window.layer, window.half).exchanges else "tp"


def _section(plan: Plan, layer: int, half: Half) -> Section:
    return next(section for section in plan.model.sections_of(layer) if section.half == half)
