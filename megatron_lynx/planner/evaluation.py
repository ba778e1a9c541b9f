"""Seconds and bytes of a plan, from its rehearsal; all commands print these.

    seconds    simulated forwards and backwards + exposed gradient reduction and update
    bytes      of the layers at each moment + of everything else on the device then

    stage 1    ... ├──F3 of chunk 1──┤   ├────────B3 of chunk 1──────┤ ...  reduction, updates

forward              layers during the forward and at its end, and between passes, when copies continue
loss, head_backward  layers just before the backward of the model's last chunk
backward             most bytes of the layers during the backward, or while its gradient is awaited or sent
embedding_backward   layers after a backward of the model's first chunk
reduction, updates   no layers; without flushes, the layers at the beginning of each update

Bytes of everything else follow from the job alone (`cost.moments`). Solvers and the filler of waits bound bytes in their own
ways, so `check_budget_kept` compares these bytes of the finished plan with the budget.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import NamedTuple

import numpy as np

from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import bounded_by_device
from megatron_lynx.cost.moments import BETWEEN_BATCHES, MOMENTS, Moment, StageMemory
from megatron_lynx.cost.stage_memory import parts_beside_layers
from megatron_lynx.cost.step import StepRange, hiding_all
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import PlannerFault, Problem
from megatron_lynx.kinds.dense.section import CORE_ATTENTION
from megatron_lynx.once import once
from megatron_lynx.plan.facts import PackedFacts
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.simulator.passes import TimedPass
from megatron_lynx.simulator.simulation import Simulation
from megatron_lynx.units import MIB, format_bytes


class PlanFigures(NamedTuple):
    step_s: float
    update_s: float
    """Exposed gradient reduction and parameter update, a part of the step."""
    memory_bytes: int
    """Those of the fullest device."""


def figures_of(job: Job, profile: Profile, simulation: Simulation) -> PlanFigures:
    """`job`: with the plan's layers. `simulation`: the plan's rehearsal with this profile."""
    added_s, stages = update_s(job, profile), range(job.parallel.pipeline)
    return PlanFigures(simulation.step_s + added_s, added_s, max(peak_bytes(job, simulation, stage) for stage in stages))


def range_of(plan: Plan, job: Job, profile: Profile, simulation: Simulation) -> StepRange:
    """Forwards and backwards of a simulated step. With userbuffers, from the most that GEMMs can hide to stock's hidden seconds
    without them."""
    best = rehearse(plan, hiding_all(profile), job=job) if job.userbuffers else simulation
    return StepRange(best.step_s, simulation.step_s)


class Held(NamedTuple):
    """Most bytes at one moment of a chunk's passes. `chunk`: None between passes and between batches."""

    stage: int
    chunk: int | None
    layers_bytes: int
    beside: StageMemory
    """Everything else on the device at that moment."""

    @property
    def moment(self) -> Moment:
        return self.beside.moment

    @property
    def device_bytes(self) -> int:
        return self.layers_bytes + self.beside.total

    @property
    def where(self) -> str:
        moment = "between passes" if (self.chunk, self.moment) == (None, "forward") else self.moment.replace("_", " ")
        return f"stage {self.stage}{'' if self.chunk is None else f', chunk {self.chunk}'}, {moment}"


def check_budget_kept(job: Job, simulation: Simulation) -> None:
    """Raises `PlannerFault` with every stage, chunk and moment that exceeds the budget. `job`: with the plan's layers."""
    problems = [problem for stage in range(job.parallel.pipeline) for _, problem in excesses(job, simulation, stage)]
    if problems:
        raise PlannerFault("the planner made a plan that exceeds its budget; this is an error of megatron-lynx", problems)


def excesses(job: Job, simulation: Simulation, stage: int) -> Iterator[tuple[int, Problem]]:
    """Yield the bytes by which a stage exceeds the budget at each moment, on the device and in its layers."""
    todo = "report it with the job (or the launch), the cluster and the budget"
    device_bytes = job.memory_budget_bytes if bounded_by_device(job) else inf
    layers_bytes = inf if job.budget.activation_mib is None else int(job.budget.activation_mib * MIB)
    for held in most_held(job, simulation, stage):
        bounds = (held.device_bytes, device_bytes, "on the device"), (held.layers_bytes, layers_bytes, "held by the layers")
        for size, most, what in bounds:
            if size > most:
                found = f"{format_bytes(size)} {what}, {format_bytes(size - most)} too much"
                yield int(size - most), Problem(held.where, found, f"at most {format_bytes(most)}", todo)


def held_by_moment(job: Job, simulation: Simulation, stage: int) -> dict[Moment, StageMemory]:
    """Most bytes of a stage's device at each of its moments, by kind."""
    fullest = {held.moment: held for held in sorted(most_held(job, simulation, stage), key=lambda held: held.device_bytes)}
    return {moment: _by_kind(fullest[moment], simulation) for moment in MOMENTS if moment in fullest}


def peak_bytes(job: Job, simulation: Simulation, stage: int) -> int:
    """The largest total of `held_by_moment`."""
    return max(held.device_bytes for held in most_held(job, simulation, stage))


def most_held(job: Job, simulation: Simulation, stage: int) -> Iterator[Held]:
    beside = parts_beside_layers(job, stage)
    at = {moment: beside.at(moment) for moment in beside.moments}
    without_head, last = replace(at["forward"], head=0), (job.parallel.pipeline - 1, job.chunks - 1)
    for (chunk, moment), size in _most_of_layers(simulation, stage, last).items():
        if moment in at:
            yield Held(stage, chunk, size, without_head if moment == "forward" and (stage, chunk) != last else at[moment])


@once
def _most_of_layers(simulation: Simulation, stage: int, last: tuple[int, int]) -> Mapping[tuple[int | None, Moment], int]:
    """Most bytes of a stage's layers at each moment: of a chunk, or between passes and batches. `last`: the last stage and chunk.

    At the loss a backward has begun, without its first allocations; in the embedding's backward it has ended, without those of a
    receive that starts then. While a gradient is awaited or sent counts as backward.
    """
    executed, curve = simulation.held.executed[stage], simulation.memory(stage)
    times_s, held = np.array(curve.times_s), np.array([*curve.bytes, 0])
    first = np.searchsorted(times_s, [execution.start_s for execution in executed], "right") - 1
    final = np.searchsorted(times_s, [execution.end_s for execution in executed], "right") - 1
    running = np.zeros(len(held))
    np.add.at(running, first, 1)
    np.add.at(running, final + 1, -1)
    updates_s = [update.arrived_s for update in simulation.updates[stage]] if simulation.updates else []
    left = int(held[np.searchsorted(times_s, updates_s, "right") - 1].max(initial=0))
    most = defaultdict[tuple[int | None, Moment], int](int, {(None, moment): left for moment in BETWEEN_BATCHES})
    most |= {(None, "forward"): int(held[np.cumsum(running) == 0].max()), (None, "optimizer_made"): 0}
    peaks = np.maximum.reduceat(held, np.column_stack([first, final + 1]).ravel()).reshape(-1, 2)[:, 0].tolist()
    for at, execution in enumerate(executed):
        chunk = execution.action.chunk
        sizes: dict[Moment, int] = {"forward" if execution.action.kind == "F" else "backward": peaks[at]}
        if execution.action.kind == "B" and (stage, chunk) == last:
            sizes["loss"] = sizes["head_backward"] = int(held[first[at]]) - _taken_at_once(execution.content)
        if execution.action.kind == "B" and (stage, chunk) == (0, 0):
            receives = at + 1 < len(executed) and executed[at + 1].action.kind == "R" and first[at + 1] == final[at]
            sizes["embedding_backward"] = int(held[final[at]]) - (_taken_at_once(executed[at + 1].content) if receives else 0)
        most |= {(chunk, moment): max(most[chunk, moment], size) for moment, size in sizes.items()}
    return most


def _by_kind(held: Held, simulation: Simulation) -> StageMemory:
    """Add the layers' bytes, divided into kept and recomputed."""
    again = 0
    if held.moment == "backward":
        curve, regenerated = simulation.memory(held.stage), simulation.regenerated(held.stage)
        at_s = curve.times_s[curve.bytes.index(held.layers_bytes)]
        again = regenerated.bytes[bisect_right(regenerated.times_s, at_s) - 1]
    kept = held.beside.activations + held.layers_bytes - again
    return replace(held.beside, activations=kept, recomputed=again)


def _taken_at_once(content: TimedPass) -> int:
    return sum(change for _, change in takewhile(lambda event: event[0] == 0, content.memory))


def with_lengths(plan: Plan, job: Job, profile: Profile, step_s: float) -> Plan:
    """Return the plan with the facts from which a run with other lengths of packed sequences can scale the predicted seconds.

    passes  =  (m + (p - 1) / v) micro-batches of the slowest stage, each with the core attention of its layers

    job: with its layers.
    step_s: of the plan's rehearsal.
    """
    if not job.batch.is_packed:
        return plan
    per_token = float(job.model.seq) if job.batch.lengths is None else min(job.model.seq, job.batch.lengths.squares_per_token)
    core_s = max(sum(_core_s(plan.chunks_of(stage), job, profile)) for stage in range(plan.parallel.pipeline))
    core_share = round(min(1.0, core_s * plan.passes(job.microbatches) / step_s), 4)
    packed = PackedFacts(squares_per_token=per_token, core_share=core_share)
    return plan.model_copy(update={"batch": plan.batch.model_copy(update={"packed": packed})})


def _core_s(entries: tuple[Stage, ...], job: Job, profile: Profile) -> Iterator[float]:
    """Seconds of each layer's core attention in one micro-batch, including recomputation."""
    for entry in entries:
        for layer in entry.layers:
            section, rule = job.model.sections(layer)[0], entry.rule_for(layer)
            if (core := profile.of(section).items.get(CORE_ATTENTION)) is not None:
                again = CORE_ATTENTION in rule.recomputed(section)
                yield core.forward_s * (1 + again) + core.backward_s
