"""Measures host time: Python's time for each half of a layer under every setting, with negligible device work.

    one rank       stock none, stock full, keep everything; each half alone: norm (and activation), or all recomputed
    TP2 + SP       each half alone: recomputed, input gathered once; kept, weight gradients in waits
    PP2, stage 0   keep everything, and offload all of it

The time of a model with one layer is subtracted. Figures of two ranks are differences to keeping everything there. Each figure
is at least that of a setting that issues a subset of its work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from itertools import pairwise
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_lynx.anatomy import DENSE, HALVES, Half
from megatron_lynx.anatomy.address import window_name
from megatron_lynx.config.cluster import Cluster, HalfHostTime, HostPasses, Implementation, LayerHostTime
from megatron_lynx.config.job import Batch, Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Overlap, Parallel
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.kinds.dense.section import ACTIVATION
from megatron_lynx.measure.measurement import Links, this_machine
from megatron_lynx.nest import all_in
from megatron_lynx.plan.plan import Plan, WeightGradients
from megatron_lynx.planner import uniform_plan
from megatron_lynx.runtime.device import device_for
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate, changed, offloading_all
from megatron_lynx.testbed.comparison import Subject, subjects_of
from megatron_lynx.testbed.cpu_device import stood_in_for
from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
from megatron_lynx.timeline import Passes
from megatron_lynx.version import __version__

LAYERS, MICROBATCHES = 6, 2
ON_CPU: dict[str, Any] = {"hidden": 32, "ffn": 64, "seq": 16, "dtype": "fp32"}
ON_GPU: dict[str, Any] = {"hidden": 256, "ffn": 704, "seq": 128, "dtype": "bf16"}
"""Small enough that any host is slower than the device, and supported by the kernels of launches."""


def measure_alone(rank: int, kind: Implementation, rounds: int, steps: int = 1) -> LayerHostTime:
    """Measure the layers of one implementation on rank 0 of 2, without the other. Runs inside `RankPool`, on one rank.

    `rounds`: turns per setting. Machines have slow phases of seconds: many short turns catch a fast one for each setting.
    `steps`: steps per turn, besides one warm-up.
    """
    from megatron_lynx.testbed.groups import join_alone

    join_alone(2)
    one, sliced, stages = job_of(kind), job_of(kind, tensor=2, sequence_parallel=True), job_of(kind, pipeline=2)
    offloaded = Candidate("offloaded", plan=offloading_all(uniform_plan(stages, "none")))
    with stand_in_for_fused_gradient():
        alone = [*_half_alone(one, "partly"), *_half_alone(one, "recomputed")]
        layer, none = _layer(one, [NONE, FULL, _kept(one), *alone], rounds, steps)
        shares = shares_of_halves(none, rounds)
        further = _beyond_kept(sliced, [*_half_alone(sliced, "gathered"), *_deferring(sliced)], rounds, steps)
        further |= _beyond_kept(stages, [offloaded], rounds, steps)
    machine, missing = this_machine(Links(kind="none"), none.device), stood_in_for(one)
    conditions = [
        *(f"megatron-lynx {__version__}", f"torch {machine.torch}", f"megatron-core {machine.megatron_core}"),
        *([] if machine.gpu is None else [machine.gpu]),
        f"{kind} layers",
        *([] if missing is None else [f"a stand-in for {missing}"]),
        f"least of {rounds * steps} steps",
    ]
    halves = {half: _half(half, shares[half], layer, further) for half in HALVES}
    return LayerHostTime(made_by=", ".join(conditions), **halves)


def job_of(kind: Implementation, **layout: Any) -> Job:
    """Return a job of two ranks with a Llama-like model: replicas, unless `layout` splits it."""
    gpu, parallel = torch.cuda.is_available(), Parallel(**layout)
    model = Model(
        **(ON_GPU if gpu else ON_CPU),
        layers=LAYERS,
        heads=4,
        kv_groups=2,
        vocab=64,
        implementation=kind,
        activation="swiglu",
        norm="rmsnorm",
        position="rope",
        bias=False,
        attention="flash" if gpu and kind == "transformer_engine" else "unfused",
    )
    micro = 1 if gpu else 2
    batch = {"micro": micro, "global": micro * MICROBATCHES * (2 // parallel.ranks)}
    return Job(
        model=model,
        cluster=Cluster(name="testbed", device="cuda" if gpu else "cpu", memory_gib=8),
        gpus=2,
        parallel=parallel,
        batch=Batch.model_validate(batch),
        overlap=Overlap(weight_gradients="deferred"),
    )


def _kept(job: Job) -> Candidate:
    return Candidate("kept", plan=uniform_plan(job, "none"))


def _half_alone(job: Job, setting: Literal["partly", "recomputed", "gathered"]) -> Iterator[Candidate]:
    for half, section in DENSE.items():
        some = [item for item in (section.norm, ACTIVATION) if item in section.names]
        items = some if setting == "partly" else section.recomputable
        plan = uniform_plan(job, items)
        yield Candidate(f"{half} {setting}", plan=plan)


def _deferring(job: Job) -> Iterator[Candidate]:
    """Delay weight gradients of a half into all waits of backward."""
    kept, halves = uniform_plan(job, "none"), job.model.halves
    waits = tuple(
        window_name("bwd", half, ordinal, 0)
        for half, section in halves.items()
        for ordinal in range(len(section.collectives("bwd", job.parallel.sequence_parallel)))
    )

    def delaying(linears: Iterable[str]) -> Plan:
        delayed = {"weight_gradients": dict.fromkeys(linears, waits)}
        return changed(kept, lambda rule: delayed, weight_gradients=WeightGradients(bytes=2**30))

    for half, section in halves.items():
        yield Candidate(f"{half} deferred", plan=delaying(section.linears))


def _layer(job: Job, candidates: Sequence[Candidate], rounds: int, steps: int) -> tuple[dict[str, Passes], Subject]:
    one_layer = job.model_copy(update={"model": job.model.model_copy(update={"layers": 1})})
    single = least_of_steps(subjects_of(one_layer, [NONE]), rounds, steps)[NONE.name]
    all_layers = subjects_of(job, candidates)
    spent = least_of_steps(all_layers, rounds, steps)
    layers = job.model.layers
    ends = single - (spent[NONE.name] - single) * (1 / (layers - 1))
    count = layers * job.microbatches
    of_layer = {name: ((seconds - ends) * (1 / count)).at_least(NO_HOST_TIME) for name, seconds in spent.items()}
    return of_layer, all_layers[NONE.name]


def _beyond_kept(job: Job, candidates: Sequence[Candidate], rounds: int, steps: int) -> dict[str, Passes]:
    spent = least_of_steps(subjects_of(job, [_kept(job), *candidates]), rounds, steps)
    count = job.microbatches * len(job.layers_of(0))
    return {candidate.name: (spent[candidate.name] - spent["kept"]) * (1 / count) for candidate in candidates}


def _half(half: Half, share: Passes, layer: dict[str, Passes], further: dict[str, Passes]) -> HalfHostTime:
    none = layer[NONE.name] * share
    kept = (layer["kept"] * share).at_least(none)

    def alone(setting: str) -> Passes:
        return (kept + layer[f"{half} {setting}"] - layer["kept"]).at_least(kept)

    recomputed = alone("recomputed")
    gathered = Passes(recomputed.forward_s, (kept + further[f"{half} gathered"]).backward_s)
    settings = {
        "none": none,
        "full": layer[FULL.name] * share,
        "kept": kept,
        "partly": alone("partly"),
        "recomputed": recomputed,
        "gathered": gathered.at_least(recomputed),
        "offloaded": (kept + further["offloaded"] * share).at_least(kept),
        "deferred": (kept + further[f"{half} deferred"]).at_least(kept),
    }
    us = {name: [round(1e6 * seconds, 1) for seconds in vars(spent).values()] for name, spent in settings.items()}
    return HalfHostTime(
        **{name: HostPasses(forward_us=forward, backward_us=backward) for name, (forward, backward) in us.items()}
    )


Clock = Callable[[], float]


def issuing_clock(device: torch.device) -> Clock:
    """Return a clock of the processor seconds of the threads that issue work. Call it in the thread that issues forwards."""
    threads = {threading.get_ident()}
    some = torch.zeros(1, device=device, requires_grad=True) * 1
    some.register_hook(lambda _: threads.add(threading.get_ident()))
    some.backward()
    clocks = [time.pthread_getcpuclockid(thread) for thread in threads]
    return lambda: sum(map(time.clock_gettime, clocks))


def least_of_steps(subjects: Mapping[str, Subject], rounds: int, steps: int) -> dict[str, Passes]:
    return {
        name: Passes(min(one.forward_s for one in samples), min(one.backward_s for one in samples))
        for name, samples in spent_in_steps(subjects, rounds, steps).items()
    }


def spent_in_steps(subjects: Mapping[str, Subject], rounds: int, steps: int) -> dict[str, list[Passes]]:
    samples: dict[str, list[Passes]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            with subject.in_force():
                subject.uncleared_step()
                samples[name] += [_timed_step(subject, issuing_clock(subject.device)) for _ in range(steps)]
    return samples


def shares_of_halves(subject: Subject, steps: int) -> dict[Half, Passes]:
    """Return each half's share of a stock layer's passes. Backward is split at the gradient of the tensor between two halves."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    subject.uncleared_step()
    clock = issuing_clock(subject.device)
    forward: dict[Half, float] = dict.fromkeys(HALVES, 0.0)
    backward: dict[Half, float] = dict.fromkeys(HALVES, 0.0)
    for _ in range(steps):
        marks: list[tuple[Half, float]] = []
        with ExitStack() as undo:
            for half, section in DENSE.items():
                clocked = _clocked(vars(TransformerLayer)[section.method], forward, half, clock)
                undo.enter_context(patch.object(TransformerLayer, section.method, _marked(clocked, half, marks, clock)))
            _idle_step(subject)
        for (half, begin_s), (following, end_s) in pairwise(marks):
            if half != following:  # time between two micro-batches belongs to neither
                backward[half] += end_s - begin_s
    whole_s = Passes(sum(forward.values()), sum(backward.values()))
    return {half: Passes(forward[half] / whole_s.forward_s, backward[half] / whole_s.backward_s) for half in HALVES}


def _idle_step(subject: Subject) -> None:
    device_for(subject.device).synchronize()
    subject.uncleared_step()


def _timed_step(subject: Subject, clock: Clock) -> Passes:
    from megatron.core.pipeline_parallel import schedules

    seconds = {"forward_step": 0.0, "backward_step": 0.0}
    with ExitStack() as undo:
        for name in seconds:  # as they are now, a plan's hooks included
            undo.enter_context(patch.object(schedules, name, _clocked(getattr(schedules, name), seconds, name, clock)))
        _idle_step(subject)
    return Passes(seconds["forward_step"], seconds["backward_step"])


def _clocked(function: Callable[..., Any], seconds: dict[Any, float], name: str, clock: Clock) -> Callable[..., Any]:
    @wraps(function)
    def clocked(*args: Any, **kwargs: Any) -> Any:
        begin_s = clock()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[name] += clock() - begin_s

    return clocked


def _marked(function: Callable[..., Any], half: Half, marks: list[tuple[Half, float]], clock: Clock) -> Callable[..., Any]:
    @wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        all_in(Tensor, result)[0].register_hook(lambda _: marks.append((half, clock())))
        return result

    return marked
