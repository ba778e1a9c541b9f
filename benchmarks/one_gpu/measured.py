"""One setting of a subject, measured: first bits, then seconds, then bytes, then where seconds go.

warm up   the first step's losses and gradients are compared with stock none's, bit for bit
time      steps one by one; the device is idle before each      ├─ passes ─┤├─ update ─┤
          issued: when Python had given the device all work of the passes, which waits where the queue is full
count     what is allocated behind each forward, and at most
trace     a plan's recomputations
profile   how long the device was busy in the passes of one more step: the union of its kernels, and of its copies
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from megatron.core.utils import get_model_config

from benchmarks.one_gpu.figures import covered_s, fingerprint
from benchmarks.one_gpu.trained import SEED, Trained
from megatron_lynx.measure.memory import activation_meter, marked
from megatron_lynx.profiler.timing import mark
from megatron_lynx.runtime.device import Event, device_for
from megatron_lynx.testbed.candidates import Candidate
from megatron_lynx.testbed.groups import seed_random_numbers
from megatron_lynx.timeline import seconds_between

WARM_UP = 2
Bits = dict[str, list[int]]
"""A fingerprint of each loss and each gradient, by name."""


@dataclass
class Row:
    """What was measured of one setting. Seconds are of one step."""

    setting: str
    passes_s: float | None = None
    """Forwards and backwards: the median."""
    samples_s: list[float] = field(default_factory=list)
    issued_s: float | None = None
    process_s: float | None = None
    """Processor time of all of this process's threads in the passes."""
    reduce_s: float | None = None
    """Of the passes, the reduction of gradients over this one rank."""
    update_s: float | None = None
    busy_s: float | None = None
    copies_s: float | None = None
    start_bytes: int | None = None
    """Allocated before a step."""
    forward_bytes: int | None = None
    """Allocated behind the first micro-batch's forward, its loss included."""
    peak_bytes: int | None = None
    """The most in forwards and backwards."""
    step_peak_bytes: int | None = None
    """The most in the whole step, the update included."""
    reserved_bytes: int | None = None
    recomputations: int | None = None
    recompute_s: float | None = None
    offloaded_bytes: int | None = None
    host_bytes: int | None = None
    exposed_copy_s: float | None = None
    losses_equal: bool | None = None
    gradients_equal: bool | None = None
    differing: list[str] = field(default_factory=list)
    """Of losses and gradients that are not stock none's, the first names."""
    error: str | None = None
    seconds: float = 0.0
    """What measuring it took."""

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Measuring:
    """Measures one setting after the other."""

    def __init__(self, trained: Trained, steps: int, bits: Bits) -> None:
        """`bits`: of stock none in an earlier process; empty, and filled in by the first setting, if there was none."""
        self._trained, self._steps, self._bits = trained, steps, bits

    def row(self, candidate: Candidate, row: Row) -> None:
        """Fills in a row as far as it gets."""
        begin_s = time.perf_counter()
        try:
            free_memory()
            with self._trained.under(candidate) as installation:
                self._compare(row)
                free_memory()
                for _ in range(WARM_UP - 1):
                    self._trained.step()
                if installation is not None:
                    installation.engine.take_counts()
                self._time(row)
                if installation is not None:
                    _counted(row, installation, self._steps)
                self._count(row)
                if installation is not None:
                    self._trace(row, installation)
                self._profile(row)
        finally:
            row.seconds = time.perf_counter() - begin_s

    def _compare(self, row: Row) -> None:
        trained = self._trained
        seed_random_numbers(SEED)
        trained.clear()
        losses = trained.passes()
        found = {f"loss {number}": fingerprint(loss) for number, loss in enumerate(losses)}
        found |= {name: fingerprint(gradient) for name, gradient in trained.gradients()}
        trained.update()
        if not self._bits:
            self._bits |= found
        row.differing = [name for name, bits in self._bits.items() if found.get(name) != bits]
        row.losses_equal = not any(name.startswith("loss ") for name in row.differing) if losses else None
        row.gradients_equal = not row.differing
        row.differing = row.differing[:5]

    def _time(self, row: Row) -> None:
        samples = [self._timed_step() for _ in range(self._steps)]
        row.samples_s = [sample["passes_s"] for sample in samples]
        for name in samples[0]:
            setattr(row, name, median(sample[name] for sample in samples))
        if torch.cuda.is_available():
            row.step_peak_bytes = torch.cuda.max_memory_allocated()
            row.reserved_bytes = torch.cuda.max_memory_reserved()

    def _timed_step(self) -> dict[str, float]:
        trained = self._trained
        trained.clear()
        with _clocked_reduction(trained) as reduction:
            wait()
            begin_s, process_s = time.perf_counter(), time.process_time()
            trained.passes()
            issued_s, process_s = time.perf_counter() - begin_s, time.process_time() - process_s
            wait()
            passes_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        trained.update()
        wait()
        return {
            "passes_s": passes_s,
            "issued_s": issued_s,
            "process_s": process_s,
            "reduce_s": reduction.seconds,
            "update_s": time.perf_counter() - begin_s,
        }

    def _count(self, row: Row) -> None:
        trained = self._trained
        trained.clear()
        free_memory()
        start_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        with activation_meter(trained.device) as meter:
            trained.passes(marked(trained.forward_step, meter, "forward"))
        row.start_bytes = start_bytes
        row.forward_bytes = start_bytes + meter.use.at("forward")
        row.peak_bytes = start_bytes + meter.use.peak_bytes
        trained.update()

    def _trace(self, row: Row, installation: Any) -> None:
        trained = self._trained
        trained.clear()
        trace = installation.engine.trace
        trace.start()
        trained.passes()
        spans = [span for span in trace.stop() if span.kind == "recompute"]
        row.recomputations, row.recompute_s = len(spans), sum(span.end_s - span.start_s for span in spans)
        installation.engine.take_counts()
        trained.update()

    def _profile(self, row: Row) -> None:
        if not torch.cuda.is_available():
            return
        from torch.autograd import DeviceType  # type: ignore[attr-defined]
        from torch.profiler import ProfilerActivity, profile

        self._trained.clear()
        wait()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            self._trained.passes()
            wait()
        on_device = [event for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
        events = [event for event in on_device if not getattr(event, "is_user_annotation", False)]
        kernels = [event for event in events if not event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))]
        row.busy_s = covered_s((event.time_range.start, event.time_range.end) for event in kernels)
        copies = [event for event in events if event not in kernels]
        row.copies_s = covered_s((event.time_range.start, event.time_range.end) for event in copies)
        self._trained.update()


def _counted(row: Row, installation: Any, steps: int) -> None:
    """What a plan did in the steps that were timed, for one of them."""
    counts = installation.engine.take_counts()
    row.offloaded_bytes, row.host_bytes = counts.offloaded_bytes // steps, counts.host_bytes
    row.exposed_copy_s = counts.exposed_copy_s / steps


class _clocked_reduction:
    """How long Megatron's `finalize_model_grads` takes on the device while this is in force."""

    def __init__(self, trained: Trained) -> None:
        self._config = get_model_config(trained.chunks[0])
        self._device = device_for(trained.device)
        self._moments: list[Event] = []
        self.seconds = 0.0

    def __enter__(self) -> _clocked_reduction:
        self._original = self._config.finalize_model_grads_func

        def clocked(*args: Any, **kwargs: Any) -> Any:
            self._moments.append(mark(self._device))
            result = self._original(*args, **kwargs)
            self._moments.append(mark(self._device))
            return result

        self._config.finalize_model_grads_func = clocked
        return self

    def __exit__(self, *error: object) -> None:
        self._config.finalize_model_grads_func = self._original
        if len(self._moments) == 2:
            begin, end = self._moments
            self.seconds = seconds_between(begin, end)


def free_memory() -> None:
    """What nobody uses goes back to the device, and its peaks begin anew."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
