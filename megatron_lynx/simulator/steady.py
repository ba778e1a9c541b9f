"""Extends a simulated step of few micro-batches to one of many.

    stage 0   F F F | F B F B | F B F B | F B ... B B B
                     (  group ) (  group )

Once every pass and copy follows the same one of the group before by the same time on every stage, each further group adds this
time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import TypeVar

from megatron_lynx.simulator.simulation import Repeated, Simulation

FEWEST_GROUPS = 4
"""With this many groups of micro-batches, every stage has two in its steady phase."""

PERIODIC = 1e-9
"""Relative difference up to which shifts count as equal."""

Simulated = TypeVar("Simulated", bound=Simulation)


def in_steady_state(group: int, microbatches: int, simulated: Callable[[int], Simulated]) -> Simulated:
    """Return a step of `microbatches`.

    Args:
        group: micro-batches after which the order of the schedule repeats.
        simulated: simulates a step with a number of micro-batches; called with as few as suffice.
    """
    groups, rest = divmod(microbatches, group)
    few = FEWEST_GROUPS
    while few < groups:
        simulation = simulated(few * group + rest)
        if (period_s := period_of(simulation, group)) is not None:
            places = tuple(_last_group(simulation, stage, group) for stage in range(len(simulation.executed)))
            return replace(simulation, repeated=Repeated(groups - few, group, period_s, places))
        few *= 2
    return simulated(microbatches)


def period_of(simulation: Simulation, group: int) -> float | None:
    """Seconds between an action and the same one `group` micro-batches earlier, in the last full group of forward-backward pairs.

    Returns None if actions, copies or stages differ in it: the pipeline is not yet in steady state.
    """
    shifts = [shift for stage in range(len(simulation.executed)) for shift in _shifts_s(simulation, stage, group)]
    longest_s = max(shifts)
    return longest_s if longest_s - min(shifts) <= PERIODIC * min(shifts) < inf else None


def _shifts_s(simulation: Simulation, stage: int, group: int) -> list[float]:
    """Shifts of one stage's passes and copies; infinite if the group before has no such pass, or one with other content."""
    executed = simulation.executed[stage]
    passes = {execution.action: execution for execution in executed if execution.action.is_pass}
    copied_s = {copy.action: copy.end_s for copy in simulation.copied[stage]}
    place, shifts = _last_group(simulation, stage, group), list[float]()
    for action in (execution.action for execution in executed[place.start : place.stop] if execution.action.is_pass):
        earlier = action._replace(micro_batch=action.micro_batch - group)
        now, before = passes[action], passes.get(earlier)
        alike = before is not None and before.content is now.content and (action in copied_s) == (earlier in copied_s)
        shifts.append(now.end_s - before.end_s if before is not None and alike else inf)
        if alike and action in copied_s:
            shifts.append(copied_s[action] - copied_s[earlier])
    return shifts


def _last_group(simulation: Simulation, stage: int, group: int) -> range:
    """Indices of the last full group of forward-backward pairs, with recomputation in receives."""
    counted = zip(simulation.executed[stage], simulation.times(stage), strict=True)
    passes = [(at, execution.action) for at, (execution, times) in enumerate(counted) if times and execution.action.is_pass]
    last_forward = max(number for number, (_, action) in enumerate(passes) if action.kind == "F")
    chunks = len({action.chunk for _, action in passes})
    rest = len(passes) // (2 * chunks) % group
    end = last_forward + 1 - 2 * max(1, rest * chunks)  # the last backward flushes delayed weight gradients
    return range(passes[max(0, end - 2 * group * chunks)][0] + 1, passes[end][0] + 1)
