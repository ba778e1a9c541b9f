"""Measures host time: what Python takes for one layer's halves under every setting, where there is next to nothing to compute.

    one rank           stock none, stock full, keep everything; one half at a time: its norm (and activation), or all of it
    two, TP2 + SP      one half at a time: all of it, its input gathered once                          } where asked for, and
    two, PP2           keep everything, and send all of it to the host                                 } ranks are even

What a step needs besides its layers is measured with a model of one layer, and subtracted. Stock's seconds are shared out between
the halves as marks in its model say (`host_clock`). What a plan does with one half alone is that half's. Figures of two ranks are
what they add to keeping everything there, so that collectives that all settings issue are not in them. Tensors are tiny, and so
are some differences: no figure is less than that of a setting which issues the same and less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_lynx.anatomy import DENSE, HALVES, Half
from megatron_lynx.anatomy.dense import ACTIVATION
from megatron_lynx.config.host_time import HalfHostTime, HostPasses, HostTime
from megatron_lynx.config.job import Job
from megatron_lynx.measure.machine import Links, this_machine
from megatron_lynx.plan.plan import Offload, Plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate, with_offload
from megatron_lynx.testbed.host_clock import Spent, least_of_steps, shares_of_halves
from megatron_lynx.testbed.hosts import LONGEST_RUN_S
from megatron_lynx.testbed.ranks import run_ranks
from megatron_lynx.testbed.subject import Subject, subjects_of
from megatron_lynx.testbed.tiny_jobs import tiny_job
from megatron_lynx.testbed.transformer_engine.imports import has_compiled_extension
from megatron_lynx.version import __version__

Implementation = Literal["local", "transformer_engine"]

LAYERS, MICROBATCHES = 6, 2


@dataclass(frozen=True)
class Asked:
    """What is to be measured, and for how long."""

    implementation: Implementation = "local"
    gathered: bool = False
    offloaded: bool = False
    rounds: int = 3
    """Turns of each setting."""
    steps: int = 2
    """Steps in each turn, beside one that does not count."""


def asked_by(job: Job) -> Asked:
    """What a plan for a job may do."""
    offloaded = job.offload_ratio != 0 and job.parallel.pipeline > 1
    return Asked(job.model.implementation, gathered=job.parallel.sequence_parallel, offloaded=offloaded)


def measure_host_time(rank: int, ranks: int, asked: Asked) -> HostTime:
    """The host time of layers of one kind, on this machine. Runs inside `RankPool`, on all of its `ranks`."""
    one = _job(asked, replicas=ranks)
    kept = Candidate("kept", plan=uniform_plan(one, "none"))
    partly, replayed = (list(_half_alone(one, setting)) for setting in ("partly", "replayed"))
    layer, none = _layer(one, [NONE, FULL, kept, *partly, *replayed], asked)
    shares = shares_of_halves(none, asked.rounds)
    further: dict[str, Spent] = {}
    pairs = ranks // 2
    if asked.gathered and 2 * pairs == ranks:
        gathering = _job(asked, tensor=2, sequence_parallel=True, replicas=pairs)
        further |= _beyond_kept(gathering, list(_half_alone(gathering, "gathered")), asked)
    if asked.offloaded and 2 * pairs == ranks:
        stages = _job(asked, pipeline=2, replicas=pairs)
        further |= _beyond_kept(stages, [Candidate("offloaded", plan=offloading_all(uniform_plan(stages, "none")))], asked)
    machine = this_machine(Links(kind="none"), none.device)
    layers = f"{asked.implementation} layers, least of {asked.rounds * asked.steps} steps"
    made_by = f"megatron-lynx {__version__}, torch {machine.torch}, megatron-core {machine.megatron_core}, {layers}"
    halves = {half: _half(half, shares[half], layer, further) for half in HALVES}
    return HostTime(cpu=machine.cpu, made_by=made_by, **halves)


def measured_here(asked: Asked | None = None, ranks: int = 1) -> HostTime:
    """This machine's host time, measured on fresh ranks: unless something else is asked, of Transformer Engine's layers where
    these can run, else of Megatron's own. Raises `RankError` with what a rank raised."""
    if asked is None:
        asked = Asked("transformer_engine" if has_compiled_extension() else "local", rounds=2)
    return slowest(run_ranks(measure_host_time, ranks, ranks, asked, timeout_s=LONGEST_RUN_S))


def slowest(found: Sequence[HostTime]) -> HostTime:
    """Of the ranks' figures those of the rank that takes longest to replay everything. What offloading adds to keeping is of the
    rank to which it adds most: the last of two stages offloads nothing."""

    def us(passes: HostPasses) -> float:
        return passes.forward_us + passes.backward_us

    def added_us(one: HostTime) -> float:
        return sum(us(half.under("offloaded")) - us(half.kept) for half in map(one.half, HALVES))

    most = max(found, key=lambda one: sum(us(half.replayed) for half in map(one.half, HALVES)))
    offloading = max(found, key=added_us)
    return most.model_copy(update={half: _with_offloading(most.half(half), offloading.half(half)) for half in HALVES})


def _with_offloading(half: HalfHostTime, of: HalfHostTime) -> HalfHostTime:
    if of.offloaded is None:
        return half
    forward_us, backward_us = (
        round(getattr(half.kept, name) + getattr(of.offloaded, name) - getattr(of.kept, name), 1)
        for name in ("forward_us", "backward_us")
    )
    return half.model_copy(update={"offloaded": HostPasses(forward_us=forward_us, backward_us=backward_us)})


def _job(asked: Asked, **layout: Any) -> Job:
    return tiny_job("llama", layers=LAYERS, microbatches=MICROBATCHES, implementation=asked.implementation, **layout)


def _half_alone(job: Job, setting: Literal["partly", "replayed", "gathered"]) -> Iterator[Candidate]:
    """Plans that replay so much of one half, on demand, and keep the other."""
    for half, section in DENSE.items():
        some = [item for item in (section.norm, ACTIVATION) if item in section.names]
        items = some if setting == "partly" else section.replayable
        plan = uniform_plan(job, items, windows=False, gather="once" if setting == "gathered" else "keep")
        yield Candidate(f"{half} {setting}", plan=plan)


def _layer(job: Job, candidates: Sequence[Candidate], asked: Asked) -> tuple[dict[str, Spent], Subject]:
    """What one layer takes of one micro-batch under every setting; and stock's model."""
    alone, all_layers = subjects_of(_with_one_layer(job), [NONE]), subjects_of(job, candidates)
    single = least_of_steps(alone, asked.rounds, asked.steps)[NONE.name]
    found = least_of_steps(all_layers, asked.rounds, asked.steps)
    layers = job.model.layers
    ends = single - (found[NONE.name] - single) * (1 / (layers - 1))
    return {name: (spent - ends) * (1 / (layers * job.microbatches)) for name, spent in found.items()}, all_layers[NONE.name]


def _beyond_kept(job: Job, candidates: Sequence[Candidate], asked: Asked) -> dict[str, Spent]:
    """What settings add to keeping everything, for one layer and micro-batch."""
    kept = Candidate("kept", plan=uniform_plan(job, "none"))
    found = least_of_steps(subjects_of(job, [kept, *candidates]), asked.rounds, asked.steps)
    count = job.microbatches * len(job.layers_of(0))
    return {each.name: (found[each.name] - found[kept.name]) * (1 / count) for each in candidates}


def _with_one_layer(job: Job) -> Job:
    return job.model_copy(update={"model": job.model.model_copy(update={"layers": 1})})


def offloading_all(plan: Plan) -> Plan:
    """The same plan; every micro-batch that waits for its backward sends all that can go to the host."""
    return with_offload(plan, Offload(bytes=2**30, smallest_tensor_bytes=0))


def _half(half: Half, share: Spent, layer: dict[str, Spent], further: dict[str, Spent]) -> HalfHostTime:
    none = layer[NONE.name] * share
    kept = (layer["kept"] * share).at_least(none)

    def alone(setting: str) -> Spent:
        return (kept + layer[f"{half} {setting}"] - layer["kept"]).at_least(kept)

    replayed, beyond = alone("replayed"), further.get(f"{half} gathered")
    gathered = None if beyond is None else Spent(replayed.forward_s, (kept + beyond).backward_s).at_least(replayed)
    offloaded = None if "offloaded" not in further else (kept + further["offloaded"] * share).at_least(kept)
    return HalfHostTime(
        none=_passes(none),
        full=_passes(layer[FULL.name] * share),
        kept=_passes(kept),
        partly=_passes(alone("partly")),
        replayed=_passes(replayed),
        gathered=None if gathered is None else _passes(gathered),
        offloaded=None if offloaded is None else _passes(offloaded),
    )


def _passes(spent: Spent) -> HostPasses:
    """Tenths of microseconds."""
    return HostPasses(forward_us=round(1e6 * spent.forward_s, 1), backward_us=round(1e6 * spent.backward_s, 1))
