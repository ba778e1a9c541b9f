"""Compares a plan with stock Megatron on ranks of this machine: bytes and bits of all candidates, then seconds of some, in turns.

All subjects share weights and gradients, which keeps them comparable and saves memory, and have no optimizer: every step starts
from the same weights. If the job delays weight gradients, all settings accumulate them in place, within `fused_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_lynx.config.job import Job
from megatron_lynx.figures import Figures
from megatron_lynx.measure.measurement import Measurement, RankResult, Setting, Skipped, this_machine, time_alternating
from megatron_lynx.measure.memory import ActivationMeter, MemoryUse, count_step, marked
from megatron_lynx.plan.plan import Plan
from megatron_lynx.planner.checks import check_plan
from megatron_lynx.testbed.candidates import (
    FULL,
    NONE,
    SELECTIVE,
    Candidate,
    blocks,
    checkpointed,
    module_sets,
    ours,
)
from megatron_lynx.testbed.fusions import add_up_in_place, adds_up_in_place, deferring_job, fused_gradient_fields, fused_gradients
from megatron_lynx.testbed.ranks import Hosts
from megatron_lynx.timeline import Span, Timeline, timeline_of
from megatron_lynx.units import format_bytes

if TYPE_CHECKING:
    from megatron_lynx.testbed.training import ForwardStep

SEED = 7
"""Seed of steps whose gradients are compared: every setting must draw the same dropout masks."""


class Subject:
    """A model under one setting. It shares the weights and gradients of the subject `like`, by default has its own."""

    def __init__(self, job: Job, candidate: Candidate, like: Subject | None = None) -> None:
        from megatron_lynx.testbed.tiny_models import build_model
        from megatron_lynx.testbed.training import named_parameters, synthetic_batches

        fields = fused_gradient_fields(job) | candidate.fields
        self.job = job
        self.candidate = candidate
        self.chunks: list[Any] = build_model(job, weights_of=None if like is None else like.chunks, **fields)
        self.parameters = named_parameters(self.chunks)
        if like is None and adds_up_in_place(job):
            for chunk in self.chunks:
                add_up_in_place(job, chunk)
        self.batches = synthetic_batches(job)

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @contextmanager
    def in_force(self) -> Iterator[Any]:
        from megatron_lynx.apply.installation import install

        if self.candidate.plan is None:
            yield None
            return
        with install(self.chunks, self.candidate.plan) as installation:
            yield installation

    def step(self) -> list[torch.Tensor]:
        """Clear gradients and run forwards and backwards; return the losses (empty except on the last stage)."""
        for parameter in self.parameters.values():
            parameter.grad = None
            if adds_up_in_place(self.job):
                parameter.main_grad.zero_()  # type: ignore[attr-defined]
        return self.uncleared_step()

    def uncleared_step(self, forward_step: ForwardStep | None = None) -> list[torch.Tensor]:
        """Run forwards and backwards only. Gradients accumulate, so none is allocated or freed."""
        from megatron_lynx.testbed.training import run_schedule

        return run_schedule(self.chunks, self.job, self.batches, forward_step_func=forward_step)

    def repeatable_step(self) -> dict[str, torch.Tensor]:
        """Run one step seeded with `SEED`; return copies of its losses and gradients by name."""
        from megatron_lynx.testbed.groups import seed_random_numbers
        from megatron_lynx.testbed.training import gradients_of

        seed_random_numbers(SEED)
        losses = self.step()
        return {f"loss {index}": loss.detach().clone() for index, loss in enumerate(losses)} | gradients_of(self.chunks)

    def counted_step(self) -> MemoryUse:
        """Return a step's memory use, marked at the end of every forward pass. Needs a warm-up step before."""
        from megatron_lynx.testbed.training import forward_step

        def step(meter: ActivationMeter) -> None:
            self.uncleared_step(marked(forward_step, meter, "forward"))

        allocated = () if adds_up_in_place(self.job) else self.parameters.values()
        return count_step(step, self.device, allocated)


def subjects_of(job: Job, candidates: Sequence[Candidate]) -> dict[str, Subject]:
    from megatron_lynx.testbed.groups import initialise

    initialise(job)
    first = Subject(job, candidates[0])
    return {candidate.name: first if candidate is candidates[0] else Subject(job, candidate, first) for candidate in candidates}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@dataclass(frozen=True)
class Lap:
    step_s: tuple[float, ...]
    events: list[Span]
    """Events of an additional traced step; empty without a plan."""


def race(rank: int, job: Job, candidates: list[Candidate], rounds: int, warmups: int) -> dict[str, Lap]:
    """Return laps by candidate name. Runs inside `RankPool`, on all ranks of the job. The first candidate is stock none."""
    with fused_gradients(job):
        return laps_of(subjects_of(job, candidates), rounds, warmups)


def laps_of(subjects: dict[str, Subject], rounds: int, warmups: int) -> dict[str, Lap]:
    """Time settings in turns, stock none among them; only the plan of the current one is installed."""
    with ExitStack() as in_force:

        def take_turn(name: str) -> None:
            in_force.close()
            in_force.enter_context(subjects[name].in_force())

        samples = time_alternating(
            {name: subject.step for name, subject in subjects.items()},
            rounds=rounds,
            warmups=warmups,
            prepare=take_turn,
            barrier=dist.barrier,
            device=subjects[NONE.name].device,
        )
    return {name: Lap(samples[name], _trace(subject)) for name, subject in subjects.items()}


def _trace(subject: Subject) -> list[Span]:
    with subject.in_force() as installation:
        if installation is None:
            return []
        dist.barrier()  # aligns the ranks' clocks
        installation.engine.trace.start()
        subject.step()
        spans: list[Span] = installation.engine.trace.stop()
        return spans


Bits = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Counted:
    candidate: Candidate
    use: MemoryUse
    most_resident_bytes: int
    """Maximum over all ranks, as `most_peak_bytes`."""
    most_peak_bytes: int
    counts: Figures
    gradients_equal: bool | None

    def holds_no_more_than(self, other: Counted) -> bool:
        return self.most_resident_bytes <= other.most_resident_bytes or self.most_peak_bytes <= other.most_peak_bytes


Census = dict[str, Counted]
"""Counts of one rank by setting. All ranks have the same settings in the same order."""


def take_census(rank: int, job: Job, plan: Plan) -> Census:
    from megatron_lynx.testbed.groups import initialise

    initialise(job)
    with fused_gradients(job):
        none = Subject(job, NONE)
        reference = none.repeatable_step()
        census = {NONE.name: _count(none)}
        for candidate in (SELECTIVE, FULL, *checkpointed(plan), *ours(plan), *module_sets(job)):
            census[candidate.name] = _count(Subject(job, candidate, none), reference)
        for candidate in blocks(job):  # each keeps more than the last
            census[candidate.name] = _count(Subject(job, candidate, none), reference)
            if not census[candidate.name].holds_no_more_than(census["ours"]):
                break
    return census


def _count(subject: Subject, reference: Bits | None = None) -> Counted:
    """Count one setting. Without `reference` the subject is the reference, already warmed up."""
    equal, counts = None, Figures()
    with subject.in_force() as installation:
        if reference is not None:
            equal = same_bits(subject.repeatable_step(), reference)
        if installation is not None:
            counts = installation.engine.take_counts()
        use = subject.counted_step()
    most_bytes = torch.tensor((use.resident_bytes, use.peak_bytes), dtype=torch.int64, device=subject.device)
    dist.all_reduce(most_bytes, op=dist.ReduceOp.MAX)
    most_resident, most_peak = most_bytes.tolist()
    return Counted(subject.candidate, use, most_resident, most_peak, counts, equal)


MOST_OPPONENTS = 3
"""Opponents timed besides stock full: those that recompute least among settings of no more bytes than ours."""

Announce = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True)
class Comparison:
    measurement: Measurement
    timeline: Timeline
    """One step of every rank under the plan."""

    @property
    def gradients_equal(self) -> bool:
        return all(setting.gradients_equal for setting in self.measurement.settings if setting.ours)


def compare(job: Job, plan: Plan, hosts: Hosts, announce: Announce, *, rounds: int = 5, warmups: int = 1) -> Comparison:
    """`hosts`: where the ranks run. Raises errors of this package, and `RankError` for other errors on a rank."""
    check_plan(job, plan)
    if any(entry.defers for entry in plan.stages):
        job = deferring_job(job)  # stock accumulates weight gradients in place as well
    with announce("counting what every setting holds, comparing gradients"):
        censuses = hosts.run(take_census, job, plan, unshaped=True)
    field = field_of(censuses[0])
    with announce(f"timing {len(field)} settings, {warmups + rounds} rounds"):
        laps = hosts.run(race, job, [counted.candidate for counted in field], rounds, warmups)
    settings = tuple(_setting(counted.candidate, censuses, laps) for counted in field)
    measurement = Measurement(
        subject=subject_of(job),
        machine=this_machine(hosts.links, hosts.device),
        device=hosts.device,
        warmups=warmups,
        settings=settings,
        skipped=tuple(left_out_of(censuses[0], field)),
    )
    return Comparison(measurement, timeline_of({rank: lap["ours"].events for rank, lap in enumerate(laps)}))


def subject_of(job: Job) -> str:
    model, parallel = job.model, job.parallel
    kind = "Llama-like" if model.activation == "swiglu" else "GPT-like"
    sequence = " with sequence parallelism" if parallel.sequence_parallel else ""
    layout = f"tensor {parallel.tensor}{sequence}, pipeline {parallel.pipeline}"
    return (
        f"{kind} model, {model.layers} layers of {model.hidden}, sequence {model.seq}; {layout}; "
        f"{job.microbatches} x {job.batch.micro} sequences a step"
    )


def field_of(census: Census) -> list[Counted]:
    """Return the settings to time: stock's usual ones, ours, and of its opponents those that keep most, and recompute least."""
    whole, stocks = census["ours"], (NONE, SELECTIVE, FULL)
    rivals = [setting for setting in census.values() if setting.candidate not in stocks and not setting.candidate.ours]
    small = [setting for setting in rivals if setting.holds_no_more_than(whole)]
    opponents = sorted(small, key=lambda setting: setting.most_resident_bytes, reverse=True)[:MOST_OPPONENTS]
    always = [census[candidate.name] for candidate in stocks]
    return [*always, *opponents, *(setting for setting in census.values() if setting.candidate.ours)]


def left_out_of(census: Census, field: list[Counted]) -> Iterator[Skipped]:
    ours = census["ours"]
    for counted in census.values():
        if counted in field:
            continue
        held = format_bytes(counted.most_resident_bytes)
        reason = "repeats more than the settings of no more bytes that were timed"
        if not counted.holds_no_more_than(ours):
            reason = f"holds {held}, ours {format_bytes(ours.most_resident_bytes)}: no opponent"
        yield Skipped(name=counted.candidate.name, reason=reason)


def _setting(candidate: Candidate, censuses: list[Census], laps: list[dict[str, Lap]]) -> Setting:
    name = candidate.name
    ranks = (_result(rank, census[name], lap[name]) for rank, (census, lap) in enumerate(zip(censuses, laps, strict=True)))
    return Setting(name=name, ours=candidate.ours, ranks=tuple(ranks))


def _result(rank: int, counted: Counted, lap: Lap) -> RankResult:
    on_demand_s = sum(span.seconds for span in lap.events if span.on_demand) if lap.events else None
    return RankResult(
        rank=rank,
        step_s=lap.step_s,
        resident_bytes=counted.use.resident_bytes,
        peak_bytes=counted.use.peak_bytes,
        gradients_equal=counted.gradients_equal,
        **(vars(counted.counts) | {"on_demand_s": on_demand_s}),
    )
