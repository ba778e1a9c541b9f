"""Measures host time: Python's time for each half of a layer under every setting, with negligible device work.

    one rank       stock none, stock full, keep everything; each half alone: norm (and activation), or all recomputed
    TP2 + SP       each half alone: recomputed, input gathered once; kept, weight gradients in waits   } if requested
    PP2, stage 0   keep everything, and offload all of it                                              }

The time of a model with one layer is subtracted. Figures of two ranks are differences to keeping everything there. Each figure
is at least that of a setting that issues a subset of its work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_lynx.anatomy import DENSE, HALVES, Half
from megatron_lynx.anatomy.address import is_forward
from megatron_lynx.config.cluster import Cluster, HalfHostTime, HostPasses, HostTime, Implementation, LayerHostTime
from megatron_lynx.config.job import Batch, Job
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Overlap, Parallel
from megatron_lynx.kinds.dense.section import ACTIVATION
from megatron_lynx.measure.measurement import Links, this_machine
from megatron_lynx.nest import all_in
from megatron_lynx.plan.plan import Offload, Plan
from megatron_lynx.planner import uniform_plan
from megatron_lynx.runtime.device import device_for
from megatron_lynx.testbed.candidates import FULL, NONE, Candidate, deferring, with_offload
from megatron_lynx.testbed.comparison import Subject, subjects_of
from megatron_lynx.testbed.fusions import adds_up_in_place, compiler_for, stand_in_for_fused_gradient
from megatron_lynx.testbed.ranks import LONGEST_RUN_S, run_ranks
from megatron_lynx.testbed.stand_in import replace, stood_in_for
from megatron_lynx.timeline import Passes
from megatron_lynx.version import __version__

LAYERS, MICROBATCHES = 6, 2
ON_CPU: dict[str, Any] = {"hidden": 32, "ffn": 64, "seq": 16, "dtype": "fp32"}
ON_GPU: dict[str, Any] = {"hidden": 256, "ffn": 704, "seq": 128, "dtype": "bf16"}
"""Small enough that any host is slower than the device, and supported by the kernels of launches."""


@dataclass(frozen=True)
class Asked:
    implementation: Implementation = "local"
    gathered: bool = False
    offloaded: bool = False
    deferred: bool = False
    rounds: int = 6
    """Turns per setting. Machines have slow phases of seconds: many short turns catch a fast one for each setting."""
    steps: int = 1
    """Steps per turn, besides one warm-up."""


def asked_by(job: Job, rounds: int) -> Asked:
    return Asked(
        job.model.implementation,
        gathered=job.parallel.sequence_parallel,
        offloaded=job.offload_ratio != 0,
        deferred=adds_up_in_place(job) and job.parallel.tensor > 1,
        rounds=rounds,
    )


def measured_here(*asked: Asked) -> HostTime:
    """Measure this machine's host time, each implementation on a fresh rank. Raises `RankError` with a rank's error."""
    layers: dict[str, LayerHostTime] = {}
    for request in asked:
        compiler = compiler_for(_job(request))
        rank_times = run_ranks(measure_alone, 1, request, pin=compiler is None, timeout_s=LONGEST_RUN_S, compiler=compiler)
        layers[request.implementation] = rank_times[0]
    return HostTime(cpu=this_machine(Links(kind="none")).cpu, **layers)


def measure_alone(rank: int, asked: Asked) -> LayerHostTime:
    """Measure the layers of one implementation on rank 0 of 2, without the other. Runs inside `RankPool`, on one rank."""
    from megatron_lynx.testbed.groups import join_alone

    join_alone(2)
    with stand_in_for_fused_gradient():
        one = _job(asked)
        kept = Candidate("kept", plan=uniform_plan(one, "none"))
        partly, recomputed = (list(_half_alone(one, setting)) for setting in ("partly", "recomputed"))
        layer, none = _layer(one, [NONE, FULL, kept, *partly, *recomputed], asked)
        shares = shares_of_halves(none, asked.rounds)
        further = _of_two_ranks(asked)
    halves = {half: _half(half, shares[half], layer, further) for half in HALVES}
    return LayerHostTime(made_by=_made_by(asked, one, none), **halves)


def _of_two_ranks(asked: Asked) -> dict[str, Passes]:
    spent: dict[str, Passes] = {}
    if asked.gathered or asked.deferred:
        sliced = _job(asked, tensor=2, sequence_parallel=True)
        gathering = list(_half_alone(sliced, "gathered")) if asked.gathered else []
        spent |= _beyond_kept(sliced, [*gathering, *(_deferring(sliced) if asked.deferred else ())], asked)
    if asked.offloaded:
        stages = _job(asked, pipeline=2)
        spent |= _beyond_kept(stages, [Candidate("offloaded", plan=offloading_all(uniform_plan(stages, "none")))], asked)
    return spent


def _made_by(asked: Asked, job: Job, subject: Subject) -> str:
    machine = this_machine(Links(kind="none"), subject.device)
    conditions = [
        f"megatron-lynx {__version__}",
        f"torch {machine.torch}",
        f"megatron-core {machine.megatron_core}",
        *([] if machine.gpu is None else [machine.gpu]),
        f"{asked.implementation} layers",
        *([] if (missing := stood_in_for(job)) is None else [f"a stand-in for {missing}"]),
        f"least of {asked.rounds * asked.steps} steps",
    ]
    return ", ".join(conditions)


def _job(asked: Asked, **layout: Any) -> Job:
    """Return a job of two ranks with a Llama-like model: replicas, unless `layout` splits it."""
    gpu, kind, parallel = torch.cuda.is_available(), asked.implementation, Parallel(**layout)
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


def _half_alone(job: Job, setting: Literal["partly", "recomputed", "gathered"]) -> Iterator[Candidate]:
    for half, section in DENSE.items():
        some = [item for item in (section.norm, ACTIVATION) if item in section.names]
        items = some if setting == "partly" else section.recomputable
        plan = uniform_plan(job, items, windows=False, gather="once" if setting == "gathered" else "keep")
        yield Candidate(f"{half} {setting}", plan=plan)


def _deferring(job: Job) -> Iterator[Candidate]:
    kept = uniform_plan(job, "none")
    for half, section in job.model.halves.items():
        yield Candidate(f"{half} deferred", plan=deferring(kept, section.linears, lambda wait: not is_forward(wait)))


def _layer(job: Job, candidates: Sequence[Candidate], asked: Asked) -> tuple[dict[str, Passes], Subject]:
    one_layer = job.model_copy(update={"model": job.model.model_copy(update={"layers": 1})})
    alone, all_layers = subjects_of(one_layer, [NONE]), subjects_of(job, candidates)
    single = least_of_steps(alone, asked.rounds, asked.steps)[NONE.name]
    steps = least_of_steps(all_layers, asked.rounds, asked.steps)
    layers = job.model.layers
    ends = single - (steps[NONE.name] - single) * (1 / (layers - 1))
    count = layers * job.microbatches
    return {name: (spent - ends) * (1 / count) for name, spent in steps.items()}, all_layers[NONE.name]


def _beyond_kept(job: Job, candidates: Sequence[Candidate], asked: Asked) -> dict[str, Passes]:
    kept = Candidate("kept", plan=uniform_plan(job, "none"))
    steps = least_of_steps(subjects_of(job, [kept, *candidates]), asked.rounds, asked.steps)
    count = job.microbatches * len(job.layers_of(0))
    return {candidate.name: (steps[candidate.name] - steps[kept.name]) * (1 / count) for candidate in candidates}


def offloading_all(plan: Plan) -> Plan:
    return with_offload(plan, Offload(bytes=2**30, smallest_tensor_bytes=0))


def _half(half: Half, share: Passes, layer: dict[str, Passes], further: dict[str, Passes]) -> HalfHostTime:
    none = layer[NONE.name] * share
    kept = (layer["kept"] * share).at_least(none)

    def alone(setting: str) -> Passes:
        return (kept + layer[f"{half} {setting}"] - layer["kept"]).at_least(kept)

    recomputed, beyond = alone("recomputed"), further.get(f"{half} gathered")
    gathered = None if beyond is None else Passes(recomputed.forward_s, (kept + beyond).backward_s).at_least(recomputed)
    offloaded = None if "offloaded" not in further else (kept + further["offloaded"] * share).at_least(kept)
    later = further.get(f"{half} deferred")
    deferred = None if later is None else (kept + later).at_least(kept)
    settings: dict[str, Passes | None] = {"none": none, "full": layer[FULL.name] * share, "kept": kept, "partly": alone("partly")}
    settings |= {"recomputed": recomputed, "gathered": gathered, "offloaded": offloaded, "deferred": deferred}
    us = {
        name: [round(1e6 * seconds, 1) for seconds in vars(spent).values()]
        for name, spent in settings.items()
        if spent is not None
    }
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
                replace(undo, TransformerLayer, section.method, _marked(clocked, half, marks, clock))
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
            replace(undo, schedules, name, _clocked(getattr(schedules, name), seconds, name, clock))
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
