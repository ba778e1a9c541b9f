"""What the device itself takes: GEMMs, copies in its memory and to the host, and its smallest kernels. Runs inside `run_ranks`.

Operands are random numbers: with zeros a GPU draws less power and is faster. They are larger than its cache together, or differ
from call to call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from benchmarks.gpu_figures.figure import Figure
from megatron_lynx.config.job import Job
from megatron_lynx.profiler.roofline import Roofline

CACHE_BYTES = 2**28
"""More than a GPU's second cache holds; operands of one call after the other are this much apart."""
ROUNDS, WARM_UP = 15, 5
CUBES = (1024, 2048, 4096, 8192)
ELEMENT = 2


@dataclass(frozen=True)
class Gemm:
    """A product of (rows, inside) and (inside, columns), `count` of them in one kernel."""

    what: str
    rows: int
    inside: int
    columns: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.count * self.rows * self.inside * self.columns

    @property
    def moved_bytes(self) -> int:
        return ELEMENT * self.count * (self.rows * self.inside + self.inside * self.columns + self.rows * self.columns)


GEMMS = (
    *(Gemm(f"cube {size}", size, size, size) for size in CUBES),
    Gemm("Llama 3 8B qkv, 8192 rows", 8192, 4096, 6144),
    Gemm("Llama 3 8B proj, 8192 rows", 8192, 4096, 4096),
    Gemm("Llama 3 8B fc1, 8192 rows", 8192, 4096, 28672),
    Gemm("Llama 3 8B fc2, 8192 rows", 8192, 14336, 4096),
    Gemm("GPT 13B fc1, 2048 rows", 2048, 5120, 20480),
    Gemm("width 1024 fc1, 2048 rows", 2048, 1024, 5632),
    Gemm("GPT 13B scores, 40 heads", 2048, 128, 2048, count=40),
)


def rates(rank: int, job: Job, dry: bool) -> tuple[list[Figure], list[str]]:
    """Figures, and notes on them. `job`: of the cluster whose figures are compared."""
    from scripts.gpu_check.copies import link

    roof, device = Roofline.of(job), torch.device("cpu" if dry else "cuda")
    torch.manual_seed(7)
    timed = [(gemm, gemm_s(gemm, device)) for gemm in (_small(GEMMS) if dry else GEMMS)]
    figures = [_gemm_figure(roof, gemm, seconds) for gemm, seconds in timed]
    cubes = [(gemm, seconds) for gemm, seconds in timed if gemm.what.startswith("cube")]
    efficiency, half_size = fitted([(gemm.flops, seconds) for gemm, seconds in cubes], roof.matmul.peak_flop_per_s("bf16"))
    figures += [
        Figure("matmul", "efficiency, fitted to the cubes", roof.matmul.efficiency, efficiency, "share"),
        Figure("matmul", "half_size, fitted to the cubes", roof.matmul.half_size, half_size, "rows"),
    ]
    figures += memory_figures(roof, 2**20 if dry else 2**31, device)
    if not dry:
        figures.append(
            Figure("hbm", "latency, a kernel among others in a graph", roof.hbm.latency_us, smallest_kernel_us(), "us")
        )
    pcie = job.cluster.pcie
    stated = 0.0 if pcie is None else pcie.byte_per_s / 1e9
    figures += [Figure("pcie", way, stated, rate, "GB/s") for way, rate in link(2**20 if dry else 2**30, device).items()]
    return figures, [f"{torch.cuda.get_device_name()}" if not dry else "a dry run: nothing here is of a GPU"]


def _small(gemms: Sequence[Gemm]) -> list[Gemm]:
    return [Gemm(each.what, 2 + number, 3, 4, min(each.count, 2)) for number, each in enumerate(gemms)]


def _gemm_figure(roof: Roofline, gemm: Gemm, seconds: float) -> Figure:
    if gemm.count > 1:
        stated_s = roof.batched_s(gemm.count, gemm.flops, gemm.moved_bytes)
    else:
        stated_s = roof.seconds(gemm.flops, gemm.moved_bytes)
    return Figure("GEMM", gemm.what, gemm.flops / stated_s / 1e12, gemm.flops / seconds / 1e12, "TFLOP/s")


def gemm_s(gemm: Gemm, device: torch.device) -> float:
    """The median of some calls, with other operands in each."""
    sets = max(1, min(ROUNDS, CACHE_BYTES // gemm.moved_bytes)) if device.type == "cuda" else 1
    first = (gemm.count, gemm.rows, gemm.inside)
    second = (gemm.count, gemm.inside, gemm.columns)
    operands = [tuple(_random(shape, gemm, device) for shape in (first, second)) for _ in range(sets)]
    results = [torch.matmul(*both) for both in operands]
    calls = _turns([partial(torch.matmul, *both, out=result) for both, result in zip(operands, results, strict=True)])
    return median_s(calls, device)


def _random(shape: tuple[int, int, int], gemm: Gemm, device: torch.device) -> torch.Tensor:
    whole = torch.randn(shape, dtype=torch.bfloat16, device=device)
    return whole if gemm.count > 1 else whole[0]


def memory_figures(roof: Roofline, size_bytes: int, device: torch.device) -> Iterator[Figure]:
    """Kernels that only read and write."""
    numbers = size_bytes // ELEMENT
    one, other, result = (torch.randn(numbers, device=device, dtype=torch.bfloat16) for _ in range(3))
    stated = roof.hbm.byte_per_s / 1e9
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "copy, read and written": (2, lambda: result.copy_(one)),
        "sum of two, read twice and written": (3, lambda: torch.add(one, other, out=result)),
        "filled, written": (1, lambda: result.fill_(1)),
    }
    for what, (times, run) in ways.items():
        yield Figure("hbm", what, stated, times * size_bytes / median_s(_turns([run]), device) / 1e9, "GB/s")


def smallest_kernel_us() -> float:
    """Of a thousand small kernels behind each other, one."""
    count, small = 1000, torch.zeros(1024, device="cuda")
    small.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            small.add_(1)
    return 1e6 * median_s(_turns([graph.replay]), torch.device("cuda")) / count


def fitted(timed: Sequence[tuple[float, float]], peak_flop_per_s: float) -> tuple[float, float]:
    """Efficiency and half size with which `Matmul.gemm_s` comes nearest to (FLOPs, seconds): a line through peak seconds over
    FLOPs, by one over the size."""
    points = [((flops / 2) ** (-1 / 3), seconds * peak_flop_per_s / flops) for flops, seconds in timed]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    at_no_end = mean_y - slope * mean_x
    return 1 / at_no_end, slope / at_no_end


def _turns(calls: Sequence[Callable[[], object]]) -> Iterator[Callable[[], object]]:
    while True:
        yield from calls


def median_s(calls: Iterator[Callable[[], object]], device: torch.device) -> float:
    """Seconds of a call, on the device's clock, while the next ones already wait: the host is not in it."""
    from megatron_lynx.profiler.timing import mark
    from megatron_lynx.runtime.device import device_for
    from megatron_lynx.timeline import seconds_between

    of_runtime = device_for(device)
    for _ in range(WARM_UP):
        next(calls)()
    marks = [mark(of_runtime)]
    for _ in range(ROUNDS):
        next(calls)()
        marks.append(mark(of_runtime))
    of_runtime.synchronize()
    return median(seconds_between(begin, end) for begin, end in pairwise(marks))
