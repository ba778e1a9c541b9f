"""Copies to host memory, on one GPU.

link        bytes a second each way, one at a time and both at once, through the runtime's own copiers and page-locked memory
hidden      a layer's step alone, the copies of what it keeps alone, both at once: the part of copying that costs nothing
order       tests of device, copier and offload on this device, and again under compute-sanitizer: parts of their own

Offloading inside training is in parts of its own: of one stage within a micro-batch, half by half, and of two stages.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from megatron_lynx.anatomy import HALVES
from megatron_lynx.config.job import Job
from megatron_lynx.cost.memory import smallest_offloaded_bytes
from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.runtime.device import Trace, copiers_for, device_for
from megatron_lynx.runtime.host_memory import HostLimit, HostMemory
from scripts.gpu_check.part import Answer

ROUNDS = 5
TELLING = ("FAILED", "ERROR", "========= ERROR SUMMARY")
MOST_LINES = 80
"""Of the output of tests that fail."""
TESTS = [f"tests/runtime/test_{of}.py" for of in ("device", "copier", "offload", "half_by_half")]


def copies(rank: int, job: Job, dry: bool) -> Answer:
    """Runs inside `RankPool`. A dry run copies little, and between the same memory."""
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    device = torch.device("cpu" if dry else "cuda")
    training = Training(job, build_model(job), optimizer=None)
    return Answer(
        figures={
            "link, GB/s": link(2**20 if dry else 2**30, device),
            f"one layer, sequence {job.model.seq}": hidden(job, training, device),
        },
    )


class Copies:
    """So many bytes, there and back, as the runtime copies them."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.bytes = sum(sizes)
        of_runtime = self._device = device_for(device)
        self._out, self._back = copiers_for(of_runtime, Trace(of_runtime))
        self._here = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
        self._lease = HostMemory("a check", of_runtime, HostLimit(4 * self.bytes + 2**20)).lend("a check", sizes)
        self._there = [self._lease.room.part(at, tensor) for at, tensor in enumerate(self._here)]

    def start(self, *, out: bool = True, back: bool = True) -> None:
        for here, there in zip(self._here, self._there, strict=True):
            if out:
                self._out.start([(there, here)], 0)
            if back:
                self._back.start([(here, there)], 0)

    def finish(self) -> None:
        self._device.synchronize()
        self._out.settle()
        self._back.settle()

    def close(self) -> None:
        self._out.close()
        self._back.close()


def link(size_bytes: int, device: torch.device) -> dict[str, float]:
    """Gigabytes (1e9) a second; `both`: of each way while the other one is under way."""
    copies = Copies([size_bytes], device)
    ways: dict[str, dict[str, bool]] = {"to host": {"back": False}, "back": {"out": False}, "both": {}}
    found = {}
    for name, way in ways.items():

        def once(way: dict[str, bool] = way) -> None:
            copies.start(**way)
            copies.finish()

        found[name] = size_bytes / least_s(once, device) / 1e9
    copies.close()
    return found


def hidden(job: Job, training: Any, device: torch.device) -> dict[str, float]:
    """Seconds of a step of one layer, and of copying out and back at once all that it would keep with fused attention.

    `hidden_share` 1: copying costs nothing.
    """
    from megatron_lynx.testbed.training import synthetic_batches

    shape = LayerShape.of(job.model_copy(update={"model": job.model.model_copy(update={"attention": "flash"})}))
    smallest = smallest_offloaded_bytes(shape.input_bytes)
    kept = [tensor.bytes for half in HALVES for tensor in half_tensors(shape, half) if tensor.saved_by]
    copies, batches = Copies([size for size in kept if size >= smallest], device), synthetic_batches(job)

    def copying() -> None:
        copies.start()
        copies.finish()

    def both() -> None:
        copies.start()
        training.step(batches)
        copies.finish()

    step_s, copy_s, both_s = (least_s(run, device) for run in (lambda: training.step(batches), copying, both))
    copies.close()
    share = (step_s + copy_s - both_s) / copy_s
    return {"step_s": step_s, "copy_s": copy_s, "both_s": both_s, "hidden_share": share, "bytes": float(copies.bytes)}


def order(rank: int, dry: bool) -> Answer:
    """Runs inside `RankPool`. The tests of order, on this device."""
    return _of_tests(_tests("cpu" if dry else "cuda"))


def order_sanitized(rank: int) -> Answer:
    """Runs inside `RankPool`. The same, with every access to the device's memory checked."""
    checked = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1", *_tests("cuda")]
    return _of_tests(checked, {"CUDA_LAUNCH_BLOCKING": "1"})  # as it makes them, and tests know it


def _tests(device: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS, "-k", f"[{device}]"]


def _of_tests(command: Sequence[str], more: Mapping[str, str] = MappingProxyType({})) -> Answer:
    """What pytest and the sanitizer say in the end; the end of all that they print, where that is not well."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **more})
    lines = [line for line in ended.stdout.strip().splitlines() if line.strip()] or ["no output"]
    telling = [line for line in lines if line.startswith(TELLING) or re.search(r"(passed|failed).* in \d", line)]
    said = f"exit status {ended.returncode}: {'; '.join(telling or lines[-1:])}"
    return Answer(wrong=("\n".join([said, *lines[-MOST_LINES:]]),)) if ended.returncode else Answer(notes=(said,))


def least_s(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """The least of some rounds, after one that warms up."""
    run()
    found = []
    for _ in range(rounds):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - begin)
    return min(found)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
