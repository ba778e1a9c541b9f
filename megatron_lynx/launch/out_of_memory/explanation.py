"""An error of PyTorch's allocator as an error of ours: what happened where, what was planned, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.launch.out_of_memory.advice import command
from megatron_lynx.launch.out_of_memory.allocator import Allocator
from megatron_lynx.launch.out_of_memory.held import states_held
from megatron_lynx.launch.out_of_memory.moment import Moment, Rank, moment_of
from megatron_lynx.plan.facts import PlannedDevice
from megatron_lynx.plan.stage import Predicted
from megatron_lynx.runtime.progress import whereabouts_of
from megatron_lynx.units import format_bytes

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
        yield Problem(where, f"{found} {format_bytes(allocator.limit_bytes)}", _needed(at_most))
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


def _needed(at_most: tuple[int, str] | None) -> str:
    return "no more than was planned" if at_most is None else f"at most {format_bytes(at_most[0])} at this moment, as planned"


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
