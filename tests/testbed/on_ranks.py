"""What the tests of the testbed run on ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_lynx.config.job import Job


@dataclass
class Run:
    """What a training run leaves to compare: losses, and after every step gradients and parameters."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)
    evaluation: list[torch.Tensor] = field(default_factory=list)

    def equals(self, other: Run) -> bool:
        return same(vars(self), vars(other))


def same(a: Any, b: Any) -> bool:
    """Equality to the bit of nested lists and dicts of tensors."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def train(rank: int, job: Job, settings: list[dict[str, Any]], **how: Any) -> list[Run]:
    """Two steps and an evaluation under each of several settings of TransformerConfig, everything else equal."""
    from tests.instruments.groups import initialise

    initialise(job)
    return [train_once(job, setting, **how) for setting in settings]


def train_once(job: Job, setting: dict[str, Any], **how: Any) -> Run:
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    with stand_in_for_fused_gradient() if setting.get("gradient_accumulation_fusion") else nullcontext():
        training = Training(job, build_model(job, **setting), **how)
        seed_random_numbers(7)
        run = Run()
        for step in range(2):
            run.losses += training.step(synthetic_batches(job, step))
            run.gradients.append(training.gradients())
            run.parameters.append({name: p.detach().clone() for name, p in training.parameters().items()})
        run.evaluation = training.evaluate(synthetic_batches(job, 9))
    return run


def losses_and_differences(
    rank: int, job: Job, like: Job, setting: dict[str, Any] | None = None, how: dict[str, Any] | None = None
) -> tuple[list[float], float, float]:
    """A job's losses, and how far two runs of it, and a run of one like it, are from those and from its gradients (relative).

    `setting` and `how` (see `train_once`) are the first job's.
    """
    setting, how = setting or {}, how or {}
    run, again = train(rank, job, [setting] * 2, **how)
    [other] = train(rank, like, [{}], **{name: value for name, value in how.items() if name == "ddp"})
    return [float(loss) for loss in run.losses], far_apart(run, again), far_apart(run, other)


def far_apart(run: Run, other: Run) -> float:
    """The largest difference of losses and gradients, relative to the largest of each tensor. Fused norms by own names."""
    from tests.instruments.tiny_models import SAME

    def tensors(of: Run) -> dict[str, torch.Tensor]:
        named = {f"loss {index}": loss for index, loss in enumerate([*of.losses, *of.evaluation])}
        for step, gradients in enumerate(of.gradients):
            for name, gradient in gradients.items():
                for fused, own in SAME.items():
                    name = name.replace(fused, own)
                named[f"{step} {name}"] = gradient
        return named

    here, there = tensors(run), tensors(other)
    assert here.keys() == there.keys()
    return max(float((here[name] - there[name]).abs().max() / there[name].abs().max()) for name in here)


def apex_against_torch(rank: int, job: Job, setting: dict[str, Any]) -> tuple[bool, float]:
    """Whether Megatron's FusedLayerNorm calls Apex's own function, and how far a run with it is from one with torch's norms."""
    from megatron.core.fusions.fused_layer_norm import FusedLayerNorm

    from megatron_lynx.testbed import tiny_models

    [torchs] = train(rank, job, [{}])
    own, tiny_models.Norm = tiny_models.Norm, FusedLayerNorm
    try:
        [apexs] = train(rank, job, [setting])
    finally:
        tiny_models.Norm = own
    is_apex = (
        FusedLayerNorm.forward.__globals__["FusedLayerNormAffineFunction"].__module__ == "apex.normalization.fused_layer_norm"
    )
    return is_apex, far_apart(apexs, torchs)


def train_with_ddp(rank: int, job: Job, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[Run]:
    """Each case: settings of TransformerConfig and arguments of Training besides `ddp`."""
    from tests.instruments.groups import initialise

    initialise(job)
    return [train_once(job, setting, ddp=True, **how) for setting, how in cases]


def train_in_thread(rank: int, job: Job) -> list[Run]:
    """The same run twice, the second one in another thread."""
    from tests.instruments.groups import initialise

    initialise(job)
    runs = [train_once(job, {})]
    thread = threading.Thread(target=lambda: runs.append(train_once(job, {})))
    thread.start()
    thread.join()
    return runs


def first_losses(rank: int, job: Job) -> list[torch.Tensor]:
    from megatron_lynx.testbed.training import synthetic_batches
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    return Training(job, build_model(job)).step(synthetic_batches(job))


def all_reduce_seconds(rank: int, size_bytes: int) -> float:
    """How long an all-reduce of that size takes, after one that opened the connections."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    data = torch.ones(size_bytes // 4)
    dist.all_reduce(data[:1])
    start = time.perf_counter()
    dist.all_reduce(data)
    seconds = time.perf_counter() - start
    dist.destroy_process_group()
    return seconds


def double(rank: int, tensor: torch.Tensor) -> tuple[int, int, set[int], torch.Tensor]:
    return rank, os.getpid(), os.sched_getaffinity(0), tensor * 2


def threads_that_look_for_events(rank: int, jobs: list[Job]) -> list[int]:
    """How many of this process's threads are gloo's, with the groups of each job."""
    from tests.instruments.groups import initialise

    counts = []
    for job in jobs:
        initialise(job)
        names = (task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())
        counts.append(sum(name == "gloo_tcp_loop" for name in names))
    return counts


def fail_on_one(rank: int) -> None:
    """Rank 1 fails while rank 0 waits for it in a collective."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def vanish(rank: int) -> None:
    os._exit(3)


def sleep(rank: int) -> None:
    time.sleep(600)


def die(rank: int) -> None:
    """As under the kernel's out-of-memory killer."""
    import os
    import signal

    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def shared_main_gradients(rank, job):
    """Whether gradients of two settings are added up in the same place, by a step of the second."""
    from megatron_lynx.testbed.candidates import FULL, NONE
    from megatron_lynx.testbed.comparison import subjects_of
    from megatron_lynx.testbed.fusions import fused_gradients

    with fused_gradients(job):
        first, second = subjects_of(job, [NONE, FULL]).values()
        places = [parameter.main_grad.data_ptr() for parameter in first.parameters.values()]
        second.step()
        same = places == [parameter.main_grad.data_ptr() for parameter in second.parameters.values()]
        return same and all(parameter.main_grad.any() for parameter in first.parameters.values())


def fused_gradients_beside_an_installed_extension(rank: int, job: Job) -> tuple[bool, bool]:
    """Where GPUs are hidden and Apex is installed: whether training runs, and whether Apex's extension is back afterwards."""
    from types import ModuleType

    from megatron.core.tensor_parallel import layers

    from megatron_lynx.testbed.fusions import NAME

    def needs_a_gpu(*_: Any) -> None:
        raise RuntimeError("no CUDA-capable device is detected")

    installed = ModuleType(NAME)
    vars(installed).update(wgrad_gemm_accum_fp32=needs_a_gpu, wgrad_gemm_accum_fp16=needs_a_gpu)
    available = layers._grad_accum_fusion_available
    sys.modules[NAME], layers._grad_accum_fusion_available = installed, True
    setattr(layers, NAME, installed)
    try:
        [[run]] = [train_with_ddp(rank, job, [({"gradient_accumulation_fusion": True}, {"optimizer": "sgd"})])]
        return len(run.losses) > 0, sys.modules[NAME] is installed and getattr(layers, NAME) is installed
    finally:
        layers._grad_accum_fusion_available = available
        delattr(layers, NAME)
        del sys.modules[NAME]
