"""Checks that a finished plan keeps its budget: the last thing that the planner does, and it believes no solver in it.

Several solvers, a filler of waits and a search for what leaves to the host each count bytes in a way of their own. One that
counts wrongly makes a plan that runs out of memory after an hour. So the finished plan is counted once more, from its rehearsal:

    stage 1    ... ├──F3 of chunk 1──┤[1]  ├[2]─────B3 of chunk 1──────┤[4] ...  reduction, updates
                                            └───────[3]────────┘                        [5]

 [1] forward: what layers hold while it runs, and at its end
 [2] loss, head's backward: what they hold when the backward of the model's last chunk is about to begin
 [3] backward: the most that they hold while it runs, or while its gradient is awaited
 [4] embedding's backward: what they hold when a backward of the model's first chunk is over
 [5] nothing of the layers is left; without flushes, what they hold when each update begins

While a stage waits for neighbours, copies go on: what it holds then counts as after a forward. What a device holds
beside the layers at each of these moments is known from the job alone (`cost.moments`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import beside_layers, bounded_by_device
from megatron_lynx.cost.moments import Moment
from megatron_lynx.errors import PlannerFault, Problem
from megatron_lynx.simulator.double_buffered import Unflushed
from megatron_lynx.simulator.passes import TimedPass
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.simulator.timeline import MemoryCurve
from megatron_lynx.units import MIB, format_bytes

BETWEEN_BATCHES: tuple[Moment, ...] = ("reduction", "first_update", "update")


class Held(NamedTuple):
    """The most that is held at one moment of the passes of one chunk. `chunk`: None between passes, and between batches."""

    stage: int
    chunk: int | None
    moment: Moment
    layers_bytes: int
    device_bytes: int


def check_budget_kept(job: Job, simulation: Simulation) -> None:
    """Raises `PlannerFault` with every stage, chunk and moment that exceeds the job's budget.

    job: with the layers of every stage, as the plan has them.
    simulation: the rehearsal of the finished plan.
    """
    if job.budget.activation_mib is None and not bounded_by_device(job):
        return
    problems = [
        problem
        for stage in range(job.parallel.pipeline)
        for held in most_held(job, simulation, stage)
        for problem in _over(job, held)
    ]
    if problems:
        raise PlannerFault("the planner made a plan that exceeds its budget; this is an error of megatron-lynx", problems)


def most_held(job: Job, simulation: Simulation, stage: int) -> Iterator[Held]:
    """The most that one stage holds, for each of its chunks at each of its moments."""
    beside = beside_layers(job, stage)
    last = (stage, job.chunks - 1) if stage == job.parallel.pipeline - 1 else None
    passes = _Passes(simulation.holding(stage), simulation.memory(stage))
    for chunk in range(job.chunks):
        layers: dict[Moment, int] = {"forward": passes.during("F", chunk), "backward": passes.during("BR", chunk)}
        if (stage, chunk) == last:
            layers |= dict.fromkeys(("loss", "head_backward"), passes.before_backward(chunk))
        if (stage, chunk) == (0, 0):
            layers["embedding_backward"] = passes.behind_backward(chunk)
        for moment in beside.moments:
            if moment in layers:
                unused = beside.head // 2 if moment == "forward" and (stage, chunk) != last else 0  # another chunk's
                yield Held(stage, chunk, moment, layers[moment], layers[moment] + beside.at(moment).total - unused)
    waiting = passes.between()
    yield Held(stage, None, "forward", waiting, waiting + beside.at("forward").total - beside.head // 2)
    left = _at_updates(simulation, stage)
    for moment in BETWEEN_BATCHES:
        yield Held(stage, None, moment, left, left + beside.at(moment).total)
    if "optimizer_made" in beside.moments:
        yield Held(stage, None, "optimizer_made", 0, beside.at("optimizer_made").total)


class _Passes:
    """The passes of one stage, and what its layers hold at their beginning, at their end and in between."""

    def __init__(self, executed: tuple[Executed, ...], curve: MemoryCurve) -> None:
        times_s, self._bytes = np.array(curve.times_s), np.array([*curve.bytes, 0])
        self._executed = executed
        self._first = np.searchsorted(times_s, [each.start_s for each in executed], "right") - 1
        self._last = np.searchsorted(times_s, [each.end_s for each in executed], "right") - 1

    def during(self, kinds: str, chunk: int) -> int:
        which = self._which(kinds, chunk)
        ranges = np.column_stack([self._first[which], self._last[which] + 1]).ravel()
        return int(np.maximum.reduceat(self._bytes, ranges).reshape(-1, 2)[:, 0].max()) if which else 0

    def between(self) -> int:
        """While none of them runs."""
        running = np.zeros(len(self._bytes))
        np.add.at(running, self._first, 1)
        np.add.at(running, self._last + 1, -1)
        return int(self._bytes[np.cumsum(running) == 0].max())

    def behind_backward(self, chunk: int) -> int:
        return int(self._bytes[self._last[self._which("B", chunk)]].max())

    def before_backward(self, chunk: int) -> int:
        """Without what it takes itself as it begins."""
        which = self._which("B", chunk)
        taken = [_taken_at_once(self._executed[number].content) for number in which]
        return int((self._bytes[self._first[which]] - taken).max())

    def _which(self, kinds: str, chunk: int) -> list[int]:
        return [number for number, (action, *_) in enumerate(self._executed) if action.chunk == chunk and action.kind in kinds]


def _taken_at_once(content: TimedPass) -> int:
    return sum(change for _, change in takewhile(lambda each: each[0] == 0, content.memory))


def _at_updates(simulation: Simulation, stage: int) -> int:
    """What layers hold at most when an update begins."""
    if not isinstance(simulation, Unflushed):
        return 0
    curve = simulation.memory(stage)
    begins = np.searchsorted(curve.times_s, [each.arrived_s for each in simulation.updates[stage]], "right") - 1
    return int(np.array(curve.bytes)[begins].max())


def _over(job: Job, held: Held) -> Iterator[Problem]:
    moment = "between passes" if (held.chunk, held.moment) == (None, "forward") else held.moment.replace("_", " ")
    where = f"stage {held.stage}{'' if held.chunk is None else f', chunk {held.chunk}'}, {moment}"
    todo = "report it with the job (or the launch), the cluster and the budget"
    if bounded_by_device(job) and (excess := held.device_bytes - job.memory_budget_bytes) > 0:
        found = f"{format_bytes(held.device_bytes)} on the device, {format_bytes(excess)} too much"
        yield Problem(where, found, f"at most {format_bytes(job.memory_budget_bytes)}", todo)
    if job.budget.activation_mib is not None and (excess := held.layers_bytes - int(job.budget.activation_mib * MIB)) > 0:
        found = f"{format_bytes(held.layers_bytes)} held by the layers, {format_bytes(excess)} too much"
        yield Problem(where, found, f"at most {job.budget.activation_mib:g} MiB", todo)
