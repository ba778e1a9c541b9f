"""How fast a plan could be at most on the rows of `benchmarks.when_not`, at their budgets: a linear programme for each stage.

    python -m benchmarks.waits_bound [what a row's name has in it]

What a layer keeps and recomputes, and which wait hides how much of each recomputation and of each weight gradient, may be any
mixture.
    every wait      what runs in it is no longer than it is; one that a weight gradient leaves that hid it is longer by that
    every GEMM      runs in one wait: it hides no more than the shorter of the two
    every gather    for a recomputation delays nothing, and spares its half's backward the wait for its own
    memory          what all micro-batches in flight keep, beside the loss; what weight gradients hold that wait for a forward
A checkpointed layer keeps its input alone. All but its last linear runs again, without collectives.
Nothing else is asked: no order, no memory for what is regenerated or gathered ahead. So no plan of this runtime is below it, and
one that is near it leaves little to gain. A step is priced by its slowest stage, and by the passes of the others before and
behind it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from benchmarks.when_not import CASES, job_of, received_s, within
from megatron_lynx import stock as settings
from megatron_lynx.anatomy import ATTENTION, DENSE, LINEARS, MLP, PASSES, Half, Pass, Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost.budget import layers_budget_bytes, loss_bytes
from megatron_lynx.cost.communication import window_lengths_s
from megatron_lynx.cost.recompute import sensible_choices
from megatron_lynx.cost.section import WeightGradient, priced, weight_gradient
from megatron_lynx.cost.stage import chunks_in_flight, cooldown_backwards, stage_seconds
from megatron_lynx.planner import decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape

Name = tuple[object, ...]
Wait = tuple[Pass, Half, int]
"""One collective of a layer: its ordinal in one pass of a half."""


@dataclass
class Programme:
    """The least of a sum of variables, none below 0, under upper bounds of other sums."""

    costs: dict[Name, float] = field(default_factory=dict)
    most: list[tuple[dict[Name, float], float]] = field(default_factory=list)
    """Sums, each with what it is at most."""

    def least(self) -> float:
        numbers = {name: number for number, name in enumerate(self.costs)}
        cells = [(row, numbers[name], share) for row, (total, _) in enumerate(self.most) for name, share in total.items()]
        rows, columns, shares = zip(*cells, strict=True)
        table = csr_array((shares, (rows, columns)), shape=(len(self.most), len(numbers)))
        choices = np.array([[float(name[0] == "layer") for name in self.costs]])
        found = linprog(list(self.costs.values()), table, [bound for _, bound in self.most], choices, [1.0])
        return float(found.fun)


@dataclass(frozen=True)
class Layer:
    """One choice of recomputed items for a layer."""

    recompute: tuple[str, ...]
    stretches_s: tuple[float, ...]
    resident_bytes: int


def layers_of(profile: Profile) -> Iterator[Layer]:
    """Every choice for both halves, and a checkpoint."""
    attention, mlp = (profile.half(section.half) for section in DENSE.values())
    again_s = attention.forward_s + mlp.forward_s - mlp.items[MLP.row_parallel].forward_s
    gathering = tuple(section.column_parallel for section in DENSE.values())
    yield Layer(("checkpoint", *gathering), (again_s,), profile.attention.input_bytes)
    for first in _halves(profile, ATTENTION):
        for second in _halves(profile, MLP):
            resident_bytes = first.resident_bytes + second.resident_bytes
            yield Layer(first.recompute + second.recompute, first.stretches_s + second.stretches_s, resident_bytes)


def _halves(profile: Profile, section: Section) -> Iterator[Layer]:
    for items in sensible_choices(section, profile.half(section.half).tensors, profile.shape.context):
        price = priced(profile, section, items)
        ends = sorted(
            {stop.seconds for stop in price.stops.values() if 0 < stop.seconds < price.recompute_s} | {price.recompute_s}
        )
        stretches = (end - begin for begin, end in zip([0.0, *ends], ends, strict=False))
        yield Layer(items, tuple(stretches), price.memory.resident)


@dataclass
class Waits:
    """The waits of one layer, with what runs in them."""

    programme: Programme
    lengths_s: Mapping[Wait, float]
    longest_s: Mapping[Wait, float]
    """Where no weight gradient hides any of it."""
    interference: float
    used: dict[Wait, dict[Name, float]] = field(default_factory=dict)

    def hide(self, what: Name, seconds: float, *, forwards: bool) -> list[tuple[Name, Wait]]:
        """Variables for one piece of work: in which wait it runs, and how much it hides there."""
        placed: list[tuple[Name, Wait]] = []
        for wait, longest_s in self.longest_s.items():
            if longest_s and (forwards or wait[0] == "bwd"):
                here, hidden = (*what, "in", wait), (*what, "hidden in", wait)
                self.programme.costs |= {here: 0.0, hidden: -1.0}
                self.programme.most.append(({hidden: 1.0, here: -min(seconds, longest_s / self.interference)}, 0.0))
                self.take(wait, hidden, self.interference)
                placed.append((here, wait))
        return placed

    def take(self, wait: Wait, name: Name, seconds: float) -> None:
        """So many seconds of a wait are taken where `name` is 1; below 0: it is longer by them."""
        total = self.used.setdefault(wait, {})
        total[name] = total.get(name, 0.0) + seconds

    def close(self) -> None:
        self.programme.most += [(total, self.lengths_s[wait]) for wait, total in self.used.items()]


def more_than_none_s(profile: Profile, job: Job, layers: int, in_flight: float, budgets: tuple[int, int]) -> float:
    """By how much a layer takes longer than without recomputation, at least, for one micro-batch; below 0: shorter.

    `budgets`: bytes that the stage's layers may hold while the loss is computed, and when backward is over.
    """
    programme = Programme()
    waits = Waits(programme, _lengths_s(profile, job, ()), _lengths_s(profile, job, LINEARS), profile.interference)
    kept: dict[Name, float] = {}
    for layer in layers_of(profile):
        chosen: Name = ("layer", layer.recompute)
        programme.costs[chosen], kept[chosen] = sum(layer.stretches_s), layers * layer.resident_bytes
        for number, stretch_s in enumerate(layer.stretches_s):
            placed = waits.hide(("recompute", layer.recompute, number), stretch_s, forwards=False)
            programme.most.append(({chosen: -1.0} | {here: 1.0 for here, _ in placed}, 0.0))
        for wait in waits.lengths_s:
            gathers = profile.shape.sequence_parallel and DENSE[wait[1]].column_parallel in layer.recompute
            if wait[0] == "bwd" and wait[2] == 1 and gathers:  # the input was gathered before: nobody waits for it
                waits.take(wait, chosen, waits.lengths_s[wait])
                programme.costs[chosen] -= waits.lengths_s[wait]
    held = {name: (in_flight - 1) * size for name, size in kept.items()}
    for section in DENSE.values():
        for linear in section.linears:
            held |= _put_off(waits, section, linear, weight_gradient(profile, section, linear), layers)
    waits.close()
    programme.most += [({name: in_flight * size for name, size in kept.items()}, budgets[0]), (held, budgets[1])]
    return programme.least()


def _put_off(waits: Waits, section: Section, linear: str, cost: WeightGradient, layers: int) -> dict[Name, float]:
    """Lets a linear put its weight gradient off; what is held by those that wait for a forward."""
    placed = waits.hide(("weight", linear), cost.seconds, forwards=True)
    waits.programme.most.append(({here: 1.0 for here, _ in placed}, 1.0))
    hidden_s = {wait: longest_s - waits.lengths_s[wait] for wait, longest_s in waits.longest_s.items() if wait[1] == section.half}
    for wait, seconds in hidden_s.items():
        if seconds and linear == section.column_parallel:
            for here, _ in placed:
                waits.programme.costs[here] += seconds
                waits.take(wait, here, -seconds)
    return {here: layers * cost.bytes for here, wait in placed if wait[0] == "fwd"}


def _lengths_s(profile: Profile, job: Job, deferred: Collection[str]) -> dict[Wait, float]:
    message_bytes = LayerShape.of(job).gathered_bytes
    return {
        (passing, section.half, ordinal): seconds
        for passing in PASSES
        for section in DENSE.values()
        for ordinal, seconds in enumerate(window_lengths_s(profile, passing, section, message_bytes, deferred))
    }


def bound_s(job: Job, profile: Profile, *, receives: bool = True) -> float:
    """No plan for a job with a memory budget takes less than this for a step.

    A stage s runs its first backward when the first micro-batch has been through all stages; by then it has run p - s forwards.
    `receives`: all of the receives of gradients is taken to hide something; else nothing of them.
    """
    pipeline, count = job.parallel.pipeline, job.microbatches
    message_s = profile.link_s("p2p", profile.attention.input_bytes)
    passes = []
    for stage in range(pipeline):
        layers, budget_bytes = job.layers_on(stage), layers_budget_bytes(job, stage)
        stock, cooldown = stage_seconds(job, profile, stage), cooldown_backwards(job, stage)
        assert budget_bytes is not None, "the job has a budget"
        budgets = budget_bytes - loss_bytes(job, stage), budget_bytes
        more_s = layers * more_than_none_s(profile, job, layers, chunks_in_flight(job, stage), budgets)
        waits_s = received_s(job, profile, stage) if receives else 0.0
        waited_s = cooldown * waits_s + (job.microbatches - cooldown) * message_s * (receives and stage < pipeline - 1)
        passes.append((stock.forward_s, stock.backward_s + more_s, waits_s, waited_s))
    through_s = sum(forward_s + backward_s - waits_s for forward_s, backward_s, waits_s, _ in passes)
    return max(
        through_s + max(0, count - (pipeline - stage)) * forward_s + (count - 1) * backward_s - waited_s
        for stage, (forward_s, backward_s, _, waited_s) in enumerate(passes)
    )


if __name__ == "__main__":
    print("| layout | ours | no plan is below | where receives hide nothing |\n|---|--:|--:|--:|")
    for what, change in CASES:
        if all(asked in what for asked in sys.argv[1:]):
            stock, profile = job_of(change), analytic_profile(job_of(change))
            allowed, none_s = within(job_of(change)), settings.priced(stock, profile, settings.NONE).step_s
            steps_s = [
                decide(allowed, profile).simulation.step_s,
                *(bound_s(allowed, profile, receives=some) for some in (True, False)),
            ]
            print("| " + " | ".join([what, *(f"{step_s / none_s:.3f}" for step_s in steps_s)]) + " |", flush=True)
