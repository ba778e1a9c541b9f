"""An error of PyTorch's allocator as an error of ours: what happened where, what was planned, and what would fit.

The nearest change after which it fits, as a command:

fragmentation alone   segments that grow where they are, but   export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
                      for --use-nccl-ub with an older torch
something lacks       a plan for less memory: what PyTorch     megatron-lynx plan --memory-gib X -o PLAN JOB
                      can have, less what this moment took
                      beyond its prediction
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping

import torch

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.out_of_memory.allocator import Allocator
from megatron_lynx.launch.out_of_memory.held import states_held
from megatron_lynx.launch.out_of_memory.moment import Moment, Rank, moment_of
from megatron_lynx.plan.facts import PlannedDevice, without_options
from megatron_lynx.plan.stage import Predicted
from megatron_lynx.runtime.progress import whereabouts_of
from megatron_lynx.torch_release import ALLOCATOR, GROWING
from megatron_lynx.units import GIB, format_bytes

LARGEST = 5
"""Kinds of bytes that are named."""


class OutOfDeviceMemory(LynxError):
    """A rank's device has no room for what the next operator makes."""

    def too(self) -> OutOfDeviceMemory:
        """The same of a rank that is not the first: another one says what would fit."""
        return OutOfDeviceMemory(f"{self.headline}, too", self.problems[:1])


def explained(error: BaseException, rank: Rank, how_far: str, plan: str) -> OutOfDeviceMemory | None:
    """What to say of an error, or None where it is none of memory. `how_far`: the run, in words; `plan`: the plan's path."""
    first = _of_memory(error)
    if first is None:
        return None
    moment = moment_of(error, rank) or Moment("outside of passes and updates")
    predicted = rank.plan.chunks_of(rank.stage)[0].predicted
    problems = list(_problems(first, moment, rank, predicted, plan))
    return OutOfDeviceMemory(f"out of device memory {how_far}", problems)


def _of_memory(error: BaseException) -> BaseException | None:
    found: BaseException | None = error
    while found is not None and not isinstance(found, torch.OutOfMemoryError):
        found = found.__cause__
    return found


def _problems(error: BaseException, moment: Moment, rank: Rank, predicted: Predicted, plan: str) -> Iterator[Problem]:
    where, allocator = f"stage {rank.stage}, {moment.words}", Allocator.of(error)
    at_most = max(((sum(held.values()), name) for name in moment.planned if (held := predicted.held_at(name))), default=None)
    if allocator is None:
        yield Problem(where, str(error).partition("\n")[0], "")
    else:
        found = f"{format_bytes(allocator.allocated_bytes)} allocated and {format_bytes(allocator.asked_bytes)} asked for, of"
        needed = "no more than was planned"
        if at_most is not None:
            needed = f"at most {format_bytes(at_most[0])} at this moment, as planned"
        yield Problem(where, f"{found} {format_bytes(allocator.limit_bytes)}", needed)
    yield Problem("planned", _planned(predicted, at_most), "")
    yield from _load(error, rank)
    if allocator is not None:
        yield Problem("held", _held(states_held(rank.chunks, rank.optimizer), allocator), "")
        yield Problem("fragmentation", _fragmented(allocator), "")
        yield from _reserve(allocator, rank.plan.device)
        to_do = command(allocator, at_most and at_most[0], plan, rank.plan.provenance.asked, may_grow=rank.may_grow)
        yield Problem("nearest change that fits", to_do, "")


def _load(error: BaseException, rank: Rank) -> Iterator[Problem]:
    """Experts of this rank that got more tokens than the plan was made for."""
    where, planned = whereabouts_of(error), rank.plan.model.moe_load
    if where is not None and where.expert_load > planned:
        found = f"{where.expert_load:.2f} of a balanced share of tokens on this rank, in this step"
        todo = "make a plan for such a load (model.experts.load)"
        yield Problem("experts", found, f"{planned:.2f}, for which the plan was made", todo)


def _planned(predicted: Predicted, at_most: tuple[int, str] | None) -> str:
    if not predicted.memory_bytes:
        return "nothing: the plan does not say what a device of this stage holds"
    whole = f"{format_bytes(predicted.memory_bytes)} at the stage's fullest"
    held = None if at_most is None else predicted.held_at(at_most[1])
    return whole if held is None else f"{whole}, at this moment {_largest(held)}"


def _held(states: Mapping[str, int], allocator: Allocator) -> str:
    rest = max(0, allocator.allocated_bytes - sum(states.values()))
    return f"{_largest(states)}, activations and everything else {format_bytes(rest)}".removeprefix(", ")


def _largest(kinds: Mapping[str, int]) -> str:
    """The largest kinds, and how much the others are together."""
    ordered = sorted(kinds.items(), key=lambda kind: -kind[1])
    words = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in ordered[:LARGEST]]
    others = sum(size for _, size in ordered[LARGEST:])
    return ", ".join([*words, *([f"others {format_bytes(others)}"] if others else [])])


def _reserve(allocator: Allocator, device: PlannedDevice | None) -> Iterator[Problem]:
    """Which part of what the plan left alone was too small, if one was; nothing where the plan does not say its parts."""
    if device is None or device.outside_bytes is None or device.slack_bytes is None or allocator.outside_bytes is None:
        return
    parts = (
        (
            "outside PyTorch's allocator (context, libraries, NCCL, other processes)",
            allocator.outside_bytes,
            device.outside_bytes,
        ),
        ("reserved and not allocated", allocator.unused_bytes, device.slack_bytes),
    )
    short = [(name, found, planned) for name, found, planned in parts if found > planned]
    for name, found, planned in short:
        yield Problem(
            f"reserve, {name}", format_bytes(found), f"at most {format_bytes(planned)}, as planned: this part was too small"
        )
    if not short:
        yield Problem("reserve", "large enough in each of its parts", "")


def _fragmented(allocator: Allocator) -> str:
    unused, free = format_bytes(allocator.unused_bytes), format_bytes(allocator.free_bytes)
    there = f"{unused} reserved and not allocated, {free} free"
    if not allocator.lacking_bytes:
        return f"{there}: together enough, so it is to blame alone"
    return f"{there}: without it {format_bytes(allocator.lacking_bytes)} would lack all the same"


DIGITS = 4
"""Of a budget, rounded down."""


def command(
    allocator: Allocator,
    planned_bytes: int | None,
    plan: str,
    asked: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    may_grow: bool = True,
) -> str:
    """What to paste. `planned_bytes`: of this moment; `asked`: the words with which the plan was asked for; `may_grow`: whether
    segments may be told to."""
    name = next((name for name in ALLOCATOR if name in environment), ALLOCATOR[-1])
    present = environment.get(name, "")
    if not allocator.lacking_bytes and GROWING not in present and may_grow:
        return f"export {name}={','.join(filter(None, [present, GROWING]))}"
    memory_gib = rounded_down(budget_bytes(allocator, planned_bytes) / GIB)
    job = "JOB (JOB: what this plan was made of)" if asked is None else without_options(asked, "--memory-gib", "--memory-share")
    return f"megatron-lynx plan --memory-gib {memory_gib} -o {plan} {job}"


def budget_bytes(allocator: Allocator, planned_bytes: int | None) -> int:
    """What a plan may need so that what it really takes is there. What is fragmented cannot be used."""
    lost = 0 if allocator.lacking_bytes else allocator.unused_bytes
    beyond = 0 if planned_bytes is None else max(0, allocator.needed_bytes - planned_bytes)
    return max(0, allocator.limit_bytes - lost - beyond)


def rounded_down(gib: float) -> str:
    """With so many significant digits that models of all sizes get a figure, never above what there is."""
    if gib <= 0:
        return "0"
    places = max(0, DIGITS - 1 - math.floor(math.log10(gib)))
    text = f"{math.floor(gib * 10**places) / 10**places:.{places}f}"
    return text.rstrip("0").rstrip(".") if places else text
