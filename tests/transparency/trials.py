"""What one rank does in a transparency test: train stock, train under a plan, compare every bit. Runs inside `RankPool`."""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_lynx.config.job import Job
from megatron_lynx.plan.plan import Plan
from tests.transparency.capturing import Captured, capturing
from tests.transparency.fp8_state import fp8_state, reset_fp8
from tests.transparency.tampering import tampered_copies


@dataclass
class Trial:
    """How a trial is run; everything has the usual value."""

    steps: int = 1
    """More where something goes from step to step: what optimizers update, scales of FP8, what routers count."""
    training: dict[str, Any] = field(default_factory=dict)
    """Arguments of `tests.instruments.training.Training`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of TransformerConfig."""
    traced: bool = False
    """Whether events of the last step are recorded."""
    counted: bool = False
    """Whether floating-point operations and collectives of the last step are counted."""
    canaries: bool = False
    """Whether what was let go is overwritten with NaN before backward."""
    backward_thread: bool = False
    """Whether backward runs in a second thread, as it does on CUDA."""
    tampered: bool = False
    """Whether every copy is late by a random time, and everything that nobody may read any more is overwritten."""
    starved: bool = False
    """Whether the first two experts get all tokens (routers with an expert bias only)."""
    recompile_limit: int | None = None
    """How many times one function is compiled until the compiler gives up and runs it as plain code; none: torch's own number."""
    deterministic: bool = False
    """Whether Megatron and torch run as with --deterministic-mode."""
    alive: bool = False
    """Whether the bytes of all tensors are counted after each step."""
    captured: Captured | None = None
    """How graphs are captured; None: nothing is."""
    compared: str = "everything"
    """Or `weights`: with the distributed optimizer a rank's own shard of gradients is reduced, the rest is not."""


@dataclass
class Seen:
    """What one training showed."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    counts: list[Any] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    flops: int = 0
    collectives: list[str] = field(default_factory=list)
    compiled: list[list[str]] = field(default_factory=list)
    """The functions that were compiled in each step; of a backward's compilation the function that it is the backward of."""
    overwritten: int = 0
    graph_replays: int = 0
    """How many times a captured graph ran its forward."""
    copies: list[tuple[str, int]] = field(default_factory=list)
    """Beginnings and ends of copies, each with the address of its host memory, in the order in which they came."""
    live_bytes: list[int] = field(default_factory=list)
    """Bytes of all tensors alive after each step."""
    frames_left: int = 0
    """And storages, and blocks of host memory that are lent."""


@dataclass
class Outcome:
    """A planned training beside the stock one."""

    differing: list[str]
    """Losses, gradients and weights that are not equal in every bit, by name and step."""
    stock: Seen
    planned: Seen


def compare_with_stock(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    """One outcome per plan."""
    from tests.instruments.groups import initialise

    initialise(job)
    torch._dynamo.reset()  # what an earlier test of these ranks compiled
    gc.collect()  # what an earlier test of these ranks left in cycles must not be counted as left by this one
    stock = train(job, None, trial)
    return [_outcome(stock, train(job, plan, trial)) for plan in plans]


def stock_seen(rank: int, job: Job, trial: Trial) -> Seen:
    """What a training of stock shows, under the settings of the trial."""
    from tests.instruments.groups import initialise

    initialise(job)
    return train(job, None, trial)


def train(job: Job, plan: Plan | None, trial: Trial) -> Seen:
    """A training from the same weights and seeds, under a plan or without."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.fusions import stand_in_for_fused_gradient
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    seen = Seen()
    with ExitStack() as stack:
        stack.enter_context(stand_in_for_fused_gradient())
        if trial.recompile_limit is not None:
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=trial.recompile_limit))
        fields = trial.model
        if trial.deterministic:
            stack.enter_context(_deterministic_algorithms())
            fields = {**fields, "deterministic_mode": True}
        reset_fp8()
        routing = _routers_figures()
        routing.clear()
        graphs = stack.enter_context(capturing(job, trial.captured)) if trial.captured is not None else None
        seed_random_numbers(7)  # Transformer Engine asks at its building whether there are random states to fork
        training = Training(job, build_model(job, **fields), **trial.training)
        if trial.starved:
            starve(training.chunks)
        seed_random_numbers(7)
        installation = stack.enter_context(install(training.chunks, plan)) if plan is not None else None
        if trial.backward_thread:
            stack.enter_context(_backward_in_a_second_thread())
        if trial.tampered and installation is not None and installation.engine.offloader is not None:
            stack.enter_context(tampered_copies(installation.engine.offloader, seen))
        if trial.canaries and plan is not None:
            stack.enter_context(_canaries(seen))
        for step in range(trial.steps):
            last = step == trial.steps - 1
            if graphs is not None and step == graphs.asked.after:
                graphs.capture(training)
            _step(training, installation, job, step, trial, seen, last)
        if trial.compared == "weights":
            seen.tensors.clear()
        for name, parameter in training.parameters().items():
            seen.tensors[f"weight {name}"] = parameter.detach().clone()
        for name, figures in routing.items():
            seen.tensors[f"router statistics {name}"] = figures["values"].detach().clone()
        for number, chunk in enumerate(training.chunks):
            buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if buffer is not None)
            seen.tensors.update({f"buffer {number}.{name}": buffer.detach().clone() for name, buffer in buffers})
        seen.graph_replays = graphs.replays if graphs is not None else 0
    seen.frames_left = sum(type(thing).__name__ in ("Frame", "OffloadedStorage", "Lease") for thing in gc.get_objects())
    return seen


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    """What `--deterministic-mode` asks torch for; uninitialised memory is filled with NaN meanwhile."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _routers_figures() -> dict[str, dict[str, Any]]:
    """What routers add up over all steps for the log: auxiliary losses by layer. (Releases from 0.18 on have it elsewhere.)"""
    from megatron.core.transformer.moe import moe_utils

    figures = moe_utils.get_moe_layer_wise_logging_tracker()
    return figures if isinstance(figures, dict) else {}


def starve(chunks: list[torch.nn.Module]) -> None:
    biases = (buffer for chunk in chunks for name, buffer in chunk.named_buffers() if name.endswith("expert_bias"))
    for bias in biases:
        bias[:2] += 100


def _step(training: Any, installation: Any, job: Job, step: int, trial: Trial, seen: Seen, last: bool) -> None:
    from megatron_lynx.testbed.training import synthetic_batches

    if installation is not None and trial.traced and last:
        installation.engine.trace.start()
    with ExitStack() as stack:
        if trial.counted and last:
            stack.enter_context(_Counting(seen))
        clear_compilation_metrics()
        losses = training.step(synthetic_batches(job, step))
    seen.compiled.append([metrics.co_name for metrics in get_compilation_metrics() if metrics.co_name is not None])
    seen.tensors.update({f"step {step}: loss {i}": loss.detach().clone() for i, loss in enumerate(losses)})
    seen.tensors.update({f"step {step}: {name}": grad for name, grad in training.gradients().items()})
    seen.tensors.update({f"step {step}: {name}": tensor for name, tensor in fp8_state(training.chunks)})
    if installation is not None:
        seen.counts.append(installation.engine.take_counts())
        seen.events = [event._asdict() for event in installation.engine.trace.stop()] if last else []
    del losses
    if trial.alive:
        seen.live_bytes.append(live_bytes() - sum(tensor.nbytes for tensor in seen.tensors.values()))


def live_bytes() -> int:
    """Of all tensors."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class _Counting(TorchDispatchMode):
    """What this rank computes, by torch's formulas of GEMMs and attention, and the names of its collectives in order.

    `FlopCounterMode` asks every operation whether it is made of others, which takes most of a tiny step. None is, where autograd
    records: those are taken apart above this mode.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._seen.collectives.append(func.name())
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        self._seen.flops += formula(*args, **(kwargs or {}), out_val=result) if formula is not None else 0
        return result


@contextmanager
def _backward_in_a_second_thread() -> Iterator[None]:
    """Megatron's `custom_backward` (a global of `schedules`) in a thread of its own, waited for."""
    from megatron.core.pipeline_parallel import schedules

    original = schedules.custom_backward

    def in_thread(*args: Any) -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                original(*args)
            except BaseException as error:  # noqa: BLE001 - handed to the waiting thread
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]

    schedules.custom_backward = in_thread
    try:
        yield
    finally:
        schedules.custom_backward = original


@contextmanager
def _canaries(seen: Seen) -> Iterator[None]:
    """Hold on to every tensor that is let go, and overwrite those that nobody else holds before the next backward. What stands in
    a recomputation for values that it does not need holds NaN, too."""
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    from megatron_lynx.runtime.frame import Absent, Frame
    from megatron_lynx.runtime.saved import memory_of

    let_go: list[torch.Tensor] = []
    made, want, backward_step = Absent.made, Frame.want, schedules.backward_step
    both_steps = combined_1f1b.combined_forward_backward_step

    def making_nothing(self: Any) -> torch.Tensor:
        absent: torch.Tensor = made(self)
        with torch.no_grad():
            return absent.fill_(NANS.get(absent.dtype, 0))

    def wanting(self: Any, key: Any, tensor: torch.Tensor) -> Any:
        let_go.extend(part.detach() for part in memory_of([tensor]))  # of a wrapper around bytes and scales, those
        return want(self, key, tensor)

    def overwriting(step: Any, *args: Any, **kwargs: Any) -> Any:
        seen.overwritten += _overwrite_unheld(let_go)
        let_go.clear()
        return step(*args, **kwargs)

    def put(*functions: Any) -> None:
        Absent.made, Frame.want, schedules.backward_step, both = functions  # type: ignore[method-assign]
        combined_1f1b.combined_forward_backward_step = both

    put(making_nothing, wanting, partial(overwriting, backward_step), wraps(both_steps)(partial(overwriting, both_steps)))
    try:
        yield
    finally:
        put(made, want, backward_step, both_steps)


NANS = {torch.float32: float("nan"), torch.bfloat16: float("nan"), torch.uint8: 0x7F}
"""By type; bytes are those of FP8."""


def _overwrite_unheld(tensors: list[torch.Tensor]) -> int:
    """NaN into every storage that only these tensors hold."""
    holders = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    count = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # one reference per tensor of ours, and one for the handle in hand, which is the very one that a waiting storage may hold
        unheld = torch._C._storage_Use_Count(storage._cdata) <= holders[storage._cdata] + 1
        if tensor.dtype in NANS and unheld and _handles(tensor) == _handles(torch.empty(1)) + 1:
            torch.tensor([], dtype=tensor.dtype).set_(storage).fill_(NANS[tensor.dtype])
            count += 1
    return count


def _handles(tensor: torch.Tensor) -> int:
    return sys.getrefcount(tensor.untyped_storage())


def _outcome(stock: Seen, planned: Seen) -> Outcome:
    names = stock.tensors.keys() | planned.tensors.keys()
    differing = [name for name in sorted(names) if not _same(stock.tensors.get(name), planned.tensors.get(name))]
    slim = [Seen(**{**vars(seen), "tensors": {}}) for seen in (stock, planned)]
    return Outcome(differing, *slim)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)
