"""Explains an out-of-memory error: its moment, the planned and the allocated bytes, and a change that fits.

Backward runs in C++, so the engine only knows which half it has reached, of those with planned work: the embedding's backward
follows the first layer's attention half, and the head's comes before the last layer's MLP half.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import ROUND_DOWN, Context
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from megatron_lynx.anatomy import HALVES
from megatron_lynx.apply.live_run import LiveRun, live_run
from megatron_lynx.environment import ALLOCATOR, GROWING
from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.ending import FirstFailure
from megatron_lynx.launch.script import stop
from megatron_lynx.plan import Plan
from megatron_lynx.plan.facts import without_options
from megatron_lynx.plan.plan import Predicted
from megatron_lynx.runtime.order import Whereabouts, whereabouts_of
from megatron_lynx.runtime.saved import memory_of
from megatron_lynx.units import GIB, KIB, MIB, format_bytes

ATTENTION = HALVES[0]


class Moment(NamedTuple):
    words: str
    planned: tuple[str, ...] = ()
    """The moments of a plan's predictions that it may be."""


@dataclass(frozen=True)
class Rank:
    plan: Plan
    stage: int
    chunks: Sequence[Any] = ()
    """Its models, without wrappers."""
    optimizer: Any = None

    def is_last(self, chunk: int) -> bool:
        return (self.stage, chunk) == (self.plan.parallel.pipeline - 1, self.plan.parallel.chunks - 1)


def moment_of(error: BaseException, rank: Rank) -> Moment | None:
    """The moment; None for an error outside of passes and updates."""
    causes = [*causes_of(error)]
    where = next(filter(None, map(whereabouts_of, causes)), None)
    if where is None:
        frames = (frame for cause in causes for frame, _ in walk_tb(cause.__traceback__))
        if rank.optimizer is None or not any(frame.f_locals.get("self") is rank.optimizer for frame in frames):
            return None
        return Moment("an update", ("first_update", "update"))
    what, *planned = _in_pass(where, rank)
    place = [] if where.micro_batch is None else [f"micro-batch {where.micro_batch}"]
    place += [f"chunk {where.chunk}"] if where.chunk else []
    place += [] if where.half is None else [f"layer {where.half[0]}", f"{where.half[1]} half"]
    after = ", or of the embedding after it" if "embedding_backward" in planned else ""
    return Moment(f"{what} of {', '.join(place) or 'a micro-batch'}{after}", tuple(planned))


def _in_pass(where: Whereabouts, rank: Rank) -> tuple[str, ...]:
    if where.recomputes:
        return "a recomputation", "backward"
    if where.half is not None:
        first = rank.plan.chunks_of(rank.stage)[where.chunk].layers.first
        of_all = where.passing == "backward" and (rank.stage, where.chunk, where.half) == (0, 0, (first, ATTENTION))
        return f"the {where.passing}", where.passing, *(["embedding_backward"] if of_all else [])
    if not rank.is_last(where.chunk):
        return f"the {where.passing}", where.passing
    if where.passing == "forward":
        return "the forward or the loss", "forward", "loss"
    return "the backward of the loss, the head or layers that the plan leaves alone,", "backward", "head_backward", "loss"


def causes_of(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


LARGEST = 5


class OutOfDeviceMemory(LynxError):
    def too(self) -> OutOfDeviceMemory:
        return OutOfDeviceMemory(f"{self.headline}, too", self.problems[:1])


def explained(error: BaseException, rank: Rank, how_far: str, plan: str) -> OutOfDeviceMemory | None:
    """Our error for one of memory, else None. `how_far`: the run's progress in words; `plan`: the plan's path."""
    first = next((cause for cause in causes_of(error) if isinstance(cause, torch.OutOfMemoryError)), None)
    if first is None:
        return None
    moment = moment_of(error, rank) or Moment("outside of passes and updates")
    predicted = rank.plan.chunks_of(rank.stage)[0].predicted
    problems = list(_problems(first, moment, rank, predicted, plan))
    return OutOfDeviceMemory(f"out of device memory {how_far}", problems)


def _problems(error: BaseException, moment: Moment, rank: Rank, predicted: Predicted, plan: str) -> Iterator[Problem]:
    where, allocator = f"stage {rank.stage}, {moment.words}", Allocator.of(error)
    fullest = max(filter(None, map(predicted.held_at, moment.planned)), key=lambda held: sum(held.values()), default=None)
    planned_bytes = None if fullest is None else sum(fullest.values())
    if allocator is None:
        yield Problem(where, str(error).partition("\n")[0], "")
    else:
        usage = f"{format_bytes(allocator.allocated_bytes)} allocated and {format_bytes(allocator.asked_bytes)} asked for, of"
        needed = "no more than was planned"
        if planned_bytes is not None:
            needed = f"at most {format_bytes(planned_bytes)} at this moment, as planned"
        yield Problem(where, f"{usage} {format_bytes(allocator.limit_bytes)}", needed)
    yield Problem("planned", _planned(predicted, fullest), "")
    yield from _load(error, rank)
    if allocator is not None:
        yield Problem("held", _held(states_held(rank.chunks, rank.optimizer), allocator), "")
        yield Problem("fragmentation", _fragmented(allocator), "")
        to_do = command(allocator, planned_bytes, plan, rank.plan.provenance.asked)
        yield Problem("nearest change that fits", to_do, "")


def _load(error: BaseException, rank: Rank) -> Iterator[Problem]:
    where, planned = whereabouts_of(error), rank.plan.model.moe_load
    if where is not None and where.expert_load > planned:
        load = f"{where.expert_load:.2f} of a balanced share of tokens on this rank, in this step"
        todo = "make a plan for such a load (model.experts.load)"
        yield Problem("experts", load, f"{planned:.2f}, for which the plan was made", todo)


def _planned(predicted: Predicted, fullest: Mapping[str, int] | None) -> str:
    if not predicted.memory_bytes:
        return "nothing: the plan does not say what a device of this stage holds"
    whole = f"{format_bytes(predicted.memory_bytes)} at the stage's fullest"
    return whole if fullest is None else f"{whole}, at this moment {_largest(fullest)}"


def _held(states: Mapping[str, int], allocator: Allocator) -> str:
    rest = max(0, allocator.allocated_bytes - sum(states.values()))
    return f"{_largest(states)}, activations and everything else {format_bytes(rest)}".removeprefix(", ")


def _largest(kinds: Mapping[str, int]) -> str:
    ordered = sorted(kinds.items(), key=lambda kind: -kind[1])
    words = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in ordered[:LARGEST]]
    others_bytes = sum(size for _, size in ordered[LARGEST:])
    return ", ".join([*words, *([f"others {format_bytes(others_bytes)}"] if others_bytes else [])])


def _fragmented(allocator: Allocator) -> str:
    unused, free = format_bytes(allocator.unused_bytes), format_bytes(allocator.free_bytes)
    summary = f"{unused} reserved and not allocated, {free} free"
    if not allocator.lacking_bytes:
        return f"{summary}: together enough, so it is to blame alone"
    return f"{summary}: without it {format_bytes(allocator.lacking_bytes)} would lack all the same"


def command(
    allocator: Allocator, planned_bytes: int | None, plan: str, asked: str | None, environment: Mapping[str, str] = os.environ
) -> str:
    """The command to paste. `asked`: the words that made the plan."""
    name = next((name for name in ALLOCATOR if name in environment), ALLOCATOR[-1])
    present = environment.get(name, "")
    if not allocator.lacking_bytes and GROWING not in present:
        return f"export {name}={','.join(filter(None, [present, GROWING]))}"
    memory_gib = rounded_down(budget_bytes(allocator, planned_bytes) / GIB)
    job = "JOB (JOB: what this plan was made of)" if asked is None else without_options(asked, "--memory-gib", "--memory-share")
    return f"megatron-lynx plan --memory-gib {memory_gib} -o {plan} {job}"


def budget_bytes(allocator: Allocator, planned_bytes: int | None) -> int:
    """Budget of a plan that fits with this run's excess over its prediction. Fragmented memory is lost."""
    lost = 0 if allocator.lacking_bytes else allocator.unused_bytes
    beyond = 0 if planned_bytes is None else max(0, allocator.needed_bytes - planned_bytes)
    return max(0, allocator.limit_bytes - lost - beyond)


def rounded_down(gib: float) -> str:
    return format(Context(prec=4, rounding=ROUND_DOWN).create_decimal_from_float(gib).normalize(), "f")


_UNITS = {"B": 1, "bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_FIGURES = {
    "asked_bytes": "Tried to allocate SIZE",
    "allocated_bytes": "Of the allocated memory SIZE is allocated",
    "unused_bytes": "and SIZE is reserved by PyTorch but unallocated",
    "free_bytes": "of which SIZE is free",
}


@dataclass(frozen=True)
class Allocator:
    """One device when it ran out of memory. Figures are as rounded as PyTorch prints them."""

    asked_bytes: int
    allocated_bytes: int
    unused_bytes: int = 0
    """Reserved and not allocated."""
    free_bytes: int = 0

    @property
    def limit_bytes(self) -> int:
        return self.allocated_bytes + self.unused_bytes + self.free_bytes

    @property
    def needed_bytes(self) -> int:
        return self.allocated_bytes + self.asked_bytes

    @property
    def lacking_bytes(self) -> int:
        """Bytes that would be missing even without fragmentation; 0 if only fragmentation is to blame."""
        return max(0, self.needed_bytes - self.limit_bytes)

    @classmethod
    def of(cls, error: BaseException) -> Allocator | None:
        """Parse the error; None if it has no figures (another library's memory, say)."""
        size = r"([\d.]+) (B|bytes|KiB|MiB|GiB)"
        found = {name: re.search(words.replace("SIZE", size), str(error)) for name, words in _FIGURES.items()}
        if found["asked_bytes"] is None or found["allocated_bytes"] is None:
            return None
        return cls(**{name: round(float(match[1]) * _UNITS[match[2]]) for name, match in found.items() if match is not None})


def states_held(models: Iterable[Module], optimizer: Any) -> dict[str, int]:
    """Allocated bytes by kind, kinds with 0 left out. Shared memory counts once, an optimizer's host memory not at all."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    devices = {parameter.device.type for parameter in parameters}
    gradients = [gradient for parameter in parameters for gradient in (getattr(parameter, "main_grad", None), parameter.grad)]
    counted: set[int] = set()
    kinds: dict[str, Iterable[Tensor]] = {
        "parameters": parameters,
        "gradients": [gradient for gradient in gradients if gradient is not None],
        "optimizer": [tensor for tensor in _tensors_of(optimizer) if not devices or tensor.device.type in devices],
    }
    kind_bytes = {kind: _memory(tensors, counted) for kind, tensors in kinds.items()}
    return {kind: size for kind, size in kind_bytes.items() if size}


def _memory(tensors: Iterable[Tensor], counted: set[int]) -> int:
    size = 0
    for tensor in memory_of(tensors):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in counted:
            counted.add(storage.data_ptr())
            size += storage.nbytes()
    return size


def _tensors_of(optimizer: Any) -> Iterator[Tensor]:
    """Main parameters and states, of Megatron's optimizers and of torch's."""
    for chained in getattr(optimizer, "chained_optimizers", ()):
        yield from _tensors_of(chained)
    inner = getattr(optimizer, "optimizer", None) or optimizer
    if inner is None or hasattr(optimizer, "chained_optimizers"):
        return
    parameters = (parameter for group in getattr(inner, "param_groups", ()) for parameter in group["params"])
    states = (value for state in (getattr(inner, "state", None) or {}).values() for value in state.values())
    yield from (tensor for tensor in (*parameters, *states) if isinstance(tensor, Tensor))


class MemoryWatch:
    def __init__(self, how_far: Callable[[], str]) -> None:
        self._how_far = how_far
        self._path = ""
        self._rank: Rank | None = None
        self._first_failure: FirstFailure | None = None

    def under(self, plan: Plan, path: str) -> None:
        """Watch runs under this plan from now on. Call after torch.distributed is initialised."""
        from megatron.core import parallel_state

        known = parallel_state.model_parallel_is_initialized()
        self._rank = Rank(plan, int(parallel_state.get_pipeline_model_parallel_rank()) if known else 0)
        self._path, self._first_failure = path, FirstFailure()

    def trains(self, model: Any, optimizer: Any) -> None:
        if self._rank is not None and isinstance(run := live_run(model), LiveRun):
            self._rank = Rank(self._rank.plan, run.stage, run.chunks, optimizer)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn an out-of-memory error inside into ours, with the original as its cause."""
        try:
            yield
        except Exception as error:
            if self._rank is None or self._first_failure is None or isinstance(error, OutOfDeviceMemory):
                raise
            explanation = explained(error, self._rank, self._how_far(), self._path)
            if explanation is not None:
                raise (explanation if self._first_failure.is_first() else explanation.too()) from error
            if not isinstance(error, LynxError):
                self._first_failure.follow()
            elif not self._first_failure.is_first():
                self._first_failure.follow(error.exit_status)
            raise

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch one step. Exits at once on an error of ours: Megatron's clean-up could wait for other ranks."""
        try:
            with self.watching():
                yield
        except LynxError as error:
            if dist.is_initialized():
                stop(error)
            raise
