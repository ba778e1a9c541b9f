"""Where reloads go: two buffers that are filled in turns, or fresh tensors. What each holds, and how long copies take.

    python -m benchmarks.reload_targets                 on CUDA where there is a GPU, else on the CPU; writes nothing

    reload of k+1   ├── into buffer (k+1) % 2, or into fresh tensors ──┤
    backward of k   ├── reads its tensors, last made first; fresh ones are freed one by one ──┤

What one layer of a Llama-like model keeps of one micro-batch goes back and forth (the sizes that the planner lets go), by the
runtime's own copiers. After each tensor that is read, a gradient as large is made and dropped, as backward does: what is
reserved beyond what is held shows how the allocator fares. Bytes are counted in a process for every mode; seconds are taken in
one more, where the modes take turns: the median over all micro-batches but the first of each turn, whose reload nothing hides.
On a CPU bytes held are the allocator's own count and bytes reserved what the process grew by; seconds there say something about
page faults (the allocator gives large tensors back to the system, and fetches them anew), and nothing about a link.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_lynx.anatomy import HALVES
from megatron_lynx.config import load_job
from megatron_lynx.cost.memory import smallest_offloaded_bytes
from megatron_lynx.kinds.planning import half_tensors
from megatron_lynx.measure.measurement import Summary, summarise
from megatron_lynx.measure.memory import count_step
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.runtime.device import Copy, Trace, copiers_for, device_for
from megatron_lynx.units import MIB
from tests.instruments.process_peak import ENVIRONMENT, ProcessPeak

Result = TypeVar("Result")
Target = Callable[[int, int], Tensor]
"""From the micro-batch and the tensor's number to where its bytes come back to."""


@dataclass(frozen=True)
class Row:
    """One mode on one device, over all micro-batches."""

    mode: str
    micro_batch_bytes: int
    held_bytes: int
    """At most, of tensors alive."""
    reserved_bytes: int
    """At most, of the device (by the caching allocator) or of the process."""
    allocations: int | None = None
    """Allocations that the caching allocator counted; unknown on a CPU."""


def fresh(sizes: Sequence[int], device: torch.device) -> Target:
    return lambda micro_batch, number: torch.empty(sizes[number], dtype=torch.uint8, device=device)


def staged(sizes: Sequence[int], device: torch.device) -> Target:
    buffers = [torch.empty(sum(sizes), dtype=torch.uint8, device=device) for _ in range(2)]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return lambda micro_batch, number: buffers[micro_batch % 2][starts[number] :][: sizes[number]]


MODES = {"fresh tensors": fresh, "two buffers": staged}


def come_and_go(target: Target, sizes: Sequence[int], device: torch.device, microbatches: int) -> list[float]:
    """Reload and read so many micro-batches; seconds of each."""
    of_runtime = device_for(device)
    out, back = copiers_for(of_runtime, Trace(of_runtime))
    host = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for size in sizes]

    def reload(micro_batch: int) -> list[tuple[Copy, Tensor]]:
        numbers = reversed(range(len(sizes)))
        targets = ((number, target(micro_batch, number)) for number in numbers)
        return [(back.start([(tensor, host[number])], 0), tensor) for number, tensor in targets]

    seconds, coming = [], reload(0)
    for micro_batch in range(microbatches):
        begin = time.perf_counter()
        present, coming = coming, reload(micro_batch + 1) if micro_batch + 1 < microbatches else []
        present.reverse()
        while present:
            copy, tensor = present.pop()
            back.wait(copy)
            gradient = tensor + 1
            del copy, tensor, gradient
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    out.close()
    back.close()
    return seconds


def measured(mode: str, sizes: Sequence[int], device: torch.device, microbatches: int) -> Row:
    """What a mode holds."""

    def run() -> None:
        come_and_go(MODES[mode](sizes, device), sizes, device, microbatches)

    run()
    host_bytes = sum(sizes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        run()
        counted = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        held, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return Row(mode, sum(sizes), held, reserved, counted)
    with ProcessPeak() as grown:
        run()
    held_bytes = count_step(lambda meter: run(), "cpu", []).peak_bytes
    return Row(mode, sum(sizes), held_bytes - host_bytes, grown.bytes - host_bytes)


def timed(sizes: Sequence[int], device: torch.device, microbatches: int, rounds: int) -> dict[str, Summary]:
    """Seconds of a micro-batch there and read, by mode."""
    targets = {mode: made(sizes, device) for mode, made in MODES.items()}
    samples: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(1 + rounds):
        for mode, target in targets.items():
            seconds = come_and_go(target, sizes, device, microbatches)[1:]
            samples[mode] += seconds if number else []
    return {mode: summarise(seconds) for mode, seconds in samples.items()}


def sizes_of(job_name: str, layers: int, seq: int) -> list[int]:
    """Bytes of every tensor that can leave, in the order in which forward makes them."""
    job = load_job(job_name, {"model.seq": seq})
    shape = LayerShape.of(job)
    smallest = smallest_offloaded_bytes(shape.input_bytes)
    halves = ([shape.input_bytes, *(tensor.bytes for tensor in half_tensors(shape, half) if tensor.saved_by)] for half in HALVES)
    return layers * [size for half in halves for size in half if size >= smallest]


def in_a_process(environment: Mapping[str, str], function: Callable[..., Result], *args: Any) -> Result:
    with _started_with(environment), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


@contextmanager
def _started_with(environment: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--job", default="jobs/llama-65b-h800-80g")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--seq", type=int, help="default: 4096 on CUDA, 256 on a CPU")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = sizes_of(asked.job, asked.layers, asked.seq or (4096 if device.type == "cuda" else 256))
    print(f"{device}: {len(sizes)} tensors of {asked.layers} layer(s), {sum(sizes) / MIB:.1f} MiB a micro-batch", flush=True)
    seconds = in_a_process({}, timed, sizes, device, asked.micro_batches, asked.rounds)
    print(
        line(("reloads go into", "held MiB", "of a micro-batch", "reserved MiB", "allocations", "s a micro-batch", "quartiles"))
    )
    print("|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for mode in MODES:
        row = in_a_process(ENVIRONMENT, measured, mode, sizes, device, asked.micro_batches)
        share, allocations = row.held_bytes / row.micro_batch_bytes, "-" if row.allocations is None else row.allocations
        bytes_ = f"{row.held_bytes / MIB:.1f}", f"{share:.2f}", f"{row.reserved_bytes / MIB:.1f}"
        took = seconds[mode]
        spread = f"{took.lower_s:.4f} to {took.upper_s:.4f}"
        print(line((mode, *bytes_, allocations, f"{took.median_s:.4f}", spread)), flush=True)


if __name__ == "__main__":
    main()
