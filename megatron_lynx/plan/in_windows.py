"""What of a plan runs while something is communicated: which norms, and in which of Megatron's groups.

windows of replays, waits of weight gradients     tp    a collective of tensor-parallel ranks
                                                  ep    an exchange of tokens
                                                  pp    the receive of a gradient
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, Window
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import planned_halves
from megatron_lynx.timetable import PlannedHalf

Group = Literal["tp", "ep", "pp"]
"""A process group, by the name that Megatron's `--high-priority-stream-groups` has for it."""


def groups_waited_for(plan: Plan) -> tuple[Group, ...]:
    """The groups for whose communication a plan's work is waited in."""
    found = {_group(plan, window) for half in _halves(plan) for window in _windows(half) if window != ON_DEMAND}
    return tuple(group for group in get_args(Group) if group in found)


def norms_in_windows(plan: Plan) -> tuple[str, ...]:
    """The norms over whole rows that run again in windows. One before a gathered input runs where that is gathered: in none."""
    found = {
        half.section.norm
        for half in _halves(plan)
        if half.section.norm in half.replay
        for place in map(half.place, BACKWARD_PHASES)
        if place.gather is None and place.stretches[0][0] != ON_DEMAND
    }
    return tuple(sorted(found))


def _halves(plan: Plan) -> Iterator[PlannedHalf]:
    return (half for stage in plan.stages for half in planned_halves(stage, plan.model.sections_of))


def _windows(half: PlannedHalf) -> Iterator[Window]:
    """Every window in which something of a half may run."""
    for place in map(half.place, BACKWARD_PHASES):
        yield from (window for window, _ in place.stretches)
    for waits in half.deferred.values():
        yield from waits


def _group(plan: Plan, window: Window) -> Group:
    if isinstance(window, str):
        return "pp"
    return "ep" if any(one.exchanges for one in plan.model.sections_of(window.layer) if one.half == window.half) else "tp"
