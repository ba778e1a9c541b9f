"""What a solver answers: one choice for each half of each layer of a stage.

    StageAnswer       one stage: what it holds, exposes and sends to the host
      └── SolvedChunks    of each of its chunks (virtual stages)
            └── Solved        LayerChoice, LayerChoice, ...    an Option for each half

Where nothing fits there is no answer: `Infeasible` is raised, and says what binds and by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds
from megatron_lynx.cost.memory import HalfMemory, peak_bytes, resident_bytes
from megatron_lynx.cost.replay import INSIDE
from megatron_lynx.cost.stage import StageSeconds
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.solver.problem import Option, StageProblem
from megatron_lynx.units import format_bytes

NOTHING_FITS = "no plan fits the budget"


@dataclass(frozen=True)
class LayerChoice:
    """What becomes of both halves of one layer."""

    attention: Option
    mlp: Option

    @property
    def halves(self) -> tuple[Option, Option]:
        """In the order of a forward."""
        return self.attention, self.mlp

    @property
    def is_fed(self) -> bool:
        """Whether the layer keeps no input, as one behind the first of a group that keeps one."""
        return self.attention.checkpoint is not None and self.attention.checkpoint.fed

    @property
    def feeds(self) -> bool:
        """Whether the layer behind it keeps none."""
        return self.mlp.checkpoint is not None and self.mlp.checkpoint.feeds

    @property
    def resident_bytes(self) -> int:
        return sum(half.memory.resident for half in self.halves)


def layers_of(halves: Sequence[Option]) -> tuple[LayerChoice, ...]:
    """Options of halves in forward order, put together as layers."""
    each = iter(halves)
    return tuple(map(LayerChoice, each, each))


@dataclass(frozen=True)
class Solved:
    """The choices for a stage's layers, first to last.

    Seconds and bytes are those of one micro-batch, but for `peak_bytes`, which counts all in flight.
    """

    layers: tuple[LayerChoice, ...]
    in_flight: float
    gap: float | None = None
    """The part of its exposed seconds that a faster answer could save at most: 0 where none is faster, None where unknown."""
    cooldown_peak_bytes: int = 0
    """The most that is held in cool-down, where that is more than the options say (`solver.chunks`)."""
    loss_bytes: int = 0
    """What the loss holds before backward reaches the layers, beyond what is held beside them then (`StageProblem`)."""

    @property
    def grouped(self) -> bool:
        """Whether several layers keep one input (`solver.groups`)."""
        return any(half.checkpoint == INSIDE for half in self.halves)

    @property
    def proven(self) -> bool:
        """Whether no answer to the problem is faster."""
        return self.gap == 0

    @cached_property
    def halves(self) -> tuple[Option, ...]:
        """In forward order."""
        return tuple(half for layer in self.layers for half in layer.halves)

    @property
    def backward_order(self) -> tuple[HalfMemory, ...]:
        return tuple(half.memory for half in self.halves[::-1])

    @cached_property
    def exposed_s(self) -> float:
        return sum(half.exposed_s for half in self.halves)

    @cached_property
    def longer_s(self) -> float:
        """By how much a micro-batch takes longer than if everything were kept; below 0 where it takes less."""
        return sum(half.longer_s for half in self.halves)

    @cached_property
    def hidden_s(self) -> float:
        return sum(half.hidden_s for half in self.halves)

    @cached_property
    def resident_bytes(self) -> int:
        return resident_bytes(self.backward_order)

    @cached_property
    def movable_bytes(self) -> int:
        """How much of one micro-batch can go to the host, including what was received."""
        return sum(half.memory.movable for half in self.halves)

    @cached_property
    def ahead_bytes(self) -> int:
        """The largest frame that is regenerated in a window, or all that are there before backward begins."""
        seated = [half.memory for half in self.halves if not half.seat.steady.on_demand]
        return max(sum(memory.early for memory in seated), max((memory.regenerated for memory in seated), default=0))

    @cached_property
    def peak_bytes(self) -> int:
        """While a micro-batch runs backward, with all others that are in flight beside it; or while the loss is computed."""
        return max(self.cooldown_peak_bytes, peak_bytes(self.backward_order, self.in_flight, self.loss_bytes))

    @cached_property
    def flops(self) -> int:
        """What one micro-batch computes again."""
        return sum(half.flops for half in self.halves)


Solver = Callable[[StageProblem], Solved]


@dataclass(frozen=True)
class Remembering:
    """A solver that remembers the last answer to each stage's problem at each budget."""

    solver: Solver
    known: dict[object, tuple[StageProblem, Solved]] = field(default_factory=dict)

    def __call__(self, problem: StageProblem) -> Solved:
        key = problem.stage, problem.layers, problem.in_flight, problem.budget_bytes, problem.loss_bytes
        asked, answer = self.known.get(key, (None, None))
        if answer is None or asked != problem:
            answer = self.solver(problem)
            self.known[key] = problem, answer
        return answer


def infeasible(problem: StageProblem, least: Solved) -> Infeasible:
    """`least` is the answer that needs the least memory; the budget is below it."""
    budget = problem.budget_bytes or 0
    held = f"{format_bytes(least.peak_bytes)} with everything replayable replayed ({problem.in_flight} in flight)"
    short = f"raise it by {format_bytes(least.peak_bytes - budget)}, or lower batch.micro, or raise parallel.tensor"
    place = f"budget.activation_mib, stage {problem.stage}"
    return Infeasible(NOTHING_FITS, [Problem(place, format_bytes(budget), f"at least {held}", short)])


class SolvedChunks(tuple[Solved, ...]):
    """By chunk: those that are in flight beside each other, then the one whose backward follows its own forward, if there is one.

    That one is solved as if it were alone."""

    @property
    def beside_each_other(self) -> tuple[Solved, ...]:
        return self[:-1] if len(self) > 1 and self[-1].in_flight == 1 else self

    @property
    def most_resident_bytes(self) -> int:
        """What the largest of those in flight beside others keeps of one micro-batch."""
        return max(chunk.resident_bytes for chunk in self.beside_each_other)

    @property
    def peak_bytes(self) -> int:
        """While any of them runs backward, with as many of the largest beside it as there can be."""
        return max(chunk.peak_bytes + self._more_beside(chunk) for chunk in self)

    @property
    def beside_bytes(self) -> int:
        """What is held of the others at most while one runs backward."""
        return ceil((self[0].in_flight - 1) * self.most_resident_bytes)

    @property
    def before_loss_bytes(self) -> int:
        """What is held when the model's last chunk has run forward: of itself, and of all that are in flight beside it."""
        return ceil(self[-1].resident_bytes + (self[0].in_flight - 1) * self.most_resident_bytes)

    def _more_beside(self, chunk: Solved) -> int:
        """How much more the others hold than as many chunks of its own kind would."""
        counted = chunk.resident_bytes if chunk.in_flight == self[0].in_flight else 0
        return ceil((self[0].in_flight - 1) * (self.most_resident_bytes - counted))


class Share(NamedTuple):
    """How much of what every chunk keeps is asked to go to the host."""

    ratio: float
    within: bool = False
    """Whether it goes within its own micro-batch (`solver.offload`), and not between passes."""


class Within(NamedTuple):
    """What leaves of each micro-batch of a stage within its own forward, and comes back within its own backward
    (`runtime.offload.group`)."""

    bytes: tuple[int, ...]
    """Of each chunk."""
    pace_bytes: tuple[int, ...]
    """So many are copied beside one half's forward of each chunk."""
    spared_bytes: int
    """What of all micro-batches in flight is not there when the last half of one ends its forward, and begins its backward."""
    at_loss_bytes: int
    """What of them is not there when the model's last chunk has run forward: then all that leaves is gone."""


@dataclass(frozen=True)
class StageAnswer:
    """The choices for one stage. Seconds are those of one micro-batch through all its chunks, but for `exposed_copies_s`."""

    stage: int
    chunks: SolvedChunks
    in_flight: int
    """Chunks between their forward and their backward, at most."""
    asked: Share
    """What of every chunk was asked to be offloaded."""
    stock: StageSeconds
    """Forward and backward without replays."""
    exposed_copies_s: float
    """Seconds of a whole step in which passes wait for copies."""
    host_sets: tuple[int, ...] = ()
    """Micro-batches of each chunk that are in host memory at once."""
    received_bytes: int = 0
    """The input of a micro-batch from the stage before. Megatron itself holds it, so it stays on the device."""
    offloaded_share: float = 0.0
    """The share of what every chunk keeps that is offloaded at least: what was asked for, or what can be moved."""
    host: HostSeconds = NO_HOST_TIME
    """What the host takes to issue all of it; 0 where that is not known."""
    within: Within | None = None
    """Of a stage that offloads within a micro-batch: then no share is."""

    @property
    def offload_ratio(self) -> float:
        """The share of what every chunk keeps that was asked to be offloaded."""
        return self.asked.ratio

    @property
    def host_late_s(self) -> float:
        """By how much its passes are longer than on the device alone, because the host is slower."""
        return self.host.beyond(self.stock.forward_s, self.stock.backward_s + self.longer_s)

    @property
    def exposed_s(self) -> float:
        return sum(chunk.exposed_s for chunk in self.chunks)

    @property
    def longer_s(self) -> float:
        """By how much its passes take longer on the device than without replays; below 0 where they take less."""
        return sum(chunk.longer_s for chunk in self.chunks)

    @property
    def peak_bytes(self) -> int:
        """What all its layers hold at most, all chunks in flight, or they and the loss. No less than what a simulation finds."""
        return self.chunks.peak_bytes - self.within_bytes

    @property
    def within_bytes(self) -> int:
        """What of all micro-batches in flight is gone when the last half of one ends its forward, and begins its backward."""
        return 0 if self.within is None else self.within.spared_bytes

    @property
    def layers_peak_bytes(self) -> int:
        """The same without the loss, while layers run backward."""
        return SolvedChunks(replace(chunk, loss_bytes=0) for chunk in self.chunks).peak_bytes - self.within_bytes

    @property
    def less_in_hand_bytes(self) -> int:
        """By how much less is held while layers run backward, what they have in hand included: all of the same may be there
        before a backward begins, with nothing in hand. 0 where copies, too, say when a stage is fullest."""
        if self.offload_ratio or self.within is not None:
            return 0
        running = SolvedChunks(replace(each, loss_bytes=-sum(half.held for half in each.backward_order)) for each in self.chunks)
        return self.layers_peak_bytes - running.peak_bytes

    @property
    def before_loss_bytes(self) -> int:
        """What is held when the model's last chunk has run forward."""
        return self.chunks.before_loss_bytes - (0 if self.within is None else self.within.at_loss_bytes)

    @property
    def chunk_bytes(self) -> int:
        """What the largest chunk that is in flight beside others keeps of one micro-batch (C)."""
        return self.chunks.most_resident_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of one rank."""
        return sum(sets * self.offloaded_bytes(chunk) for chunk, sets in enumerate(self.host_sets))

    def offloaded_bytes(self, chunk: int) -> int:
        """What one micro-batch of a chunk offloads."""
        if self.within is not None:
            return self.within.bytes[chunk]
        return min(int(self.offload_ratio * self.chunks[chunk].resident_bytes), self._movable_bytes(chunk))

    @property
    def movable_share(self) -> float:
        """The part of what a chunk keeps that can be offloaded, for the chunk for which that is least."""
        return min(
            (
                self._movable_bytes(at) / max(1, chunk.resident_bytes)
                for at, chunk in enumerate(self.chunks.beside_each_other)
                if chunk.layers
            ),
            default=0.0,
        )

    def _movable_bytes(self, chunk: int) -> int:
        received = 0 if (self.stage, chunk) == (0, 0) else self.received_bytes
        return max(0, self.chunks[chunk].movable_bytes - received)

    def seconds(self, microbatches: int) -> float:
        """How long one micro-batch takes, with its part of the exposed copies."""
        return self.stock.both_s + self.longer_s + self.host_late_s + self.exposed_copies_s / microbatches
