"""Answers of a solver: an option for each half of each layer of a stage.

    StageAnswer       one stage: bytes, exposed seconds, bytes sent to the host
      └── SolvedChunks    its chunks (virtual stages)
            └── Solved        Option, Option, ...    for each half of its layers

If nothing fits, `Infeasible` is raised. It says what binds and by how much.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import NamedTuple

from megatron_lynx.anatomy import Section, by_layer
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.cost.memory import HalfMemory, peak_bytes, resident_bytes
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.solver.problem import Option, StageProblem
from megatron_lynx.timeline import Passes
from megatron_lynx.units import format_bytes

NOTHING_FITS = "no plan fits the budget"


@dataclass(frozen=True)
class Solved:
    """Options of the halves of a stage's layers, first to last.

    Seconds and bytes are for one micro-batch, except for `peak_bytes`, which counts all in flight.
    """

    halves: tuple[Option, ...]
    in_flight: float
    loss_bytes: int = 0

    @property
    def layers(self) -> tuple[tuple[Option, Option], ...]:
        return by_layer(self.halves)

    @property
    def backward_order(self) -> tuple[HalfMemory, ...]:
        return tuple(half.memory for half in self.halves[::-1])

    @cached_property
    def exposed_s(self) -> float:
        return sum(half.exposed_s for half in self.halves)

    @cached_property
    def longer_s(self) -> float:
        """Seconds that a micro-batch takes longer than without recomputation; negative if it takes less."""
        return sum(half.longer_s for half in self.halves)

    @cached_property
    def hidden_s(self) -> float:
        return sum(half.hidden_s for half in self.halves)

    @cached_property
    def resident_bytes(self) -> int:
        return resident_bytes(self.backward_order)

    @cached_property
    def movable_bytes(self) -> int:
        """Bytes of one micro-batch that can go to the host, its received input included."""
        return sum(half.memory.movable for half in self.halves)

    @cached_property
    def ahead_bytes(self) -> int:
        """Largest number of bytes recomputed in a window."""
        seated = [half.memory for half in self.halves if half.window]
        return max((memory.regenerated for memory in seated), default=0)

    @cached_property
    def peak_bytes(self) -> int:
        return peak_bytes(self.backward_order, self.in_flight, self.loss_bytes)

    @cached_property
    def flops(self) -> int:
        return sum(half.flops for half in self.halves)


Solver = Callable[[StageProblem], Solved]


def infeasible(problem: StageProblem, least: Solved) -> Infeasible:
    """`least`: the answer with the least peak."""
    budget = problem.budget_bytes or 0
    held = f"{format_bytes(least.peak_bytes)} with everything recomputable recomputed ({problem.in_flight} in flight)"
    short = f"raise it by {format_bytes(least.peak_bytes - budget)}, or lower batch.micro, or raise parallel.tensor"
    place = f"budget.activation_mib, stage {problem.stage}"
    return Infeasible(NOTHING_FITS, [Problem(place, format_bytes(budget), f"at least {held}", short)])


class SolvedChunks(tuple[Solved, ...]):
    """Chunks in flight beside each other, then the one whose backward follows its own forward, if there is one.

    The latter is solved as if it were alone.
    """

    @property
    def beside_each_other(self) -> tuple[Solved, ...]:
        return self[:-1] if len(self) > 1 and self[-1].in_flight == 1 else self

    @property
    def most_resident_bytes(self) -> int:
        """Bytes of one micro-batch on the largest of chunks beside others (C)."""
        return max(chunk.resident_bytes for chunk in self.beside_each_other)

    @property
    def peak_bytes(self) -> int:
        """Peak while any of them runs backward, with as many of the largest in flight as possible."""
        return max(chunk.peak_bytes + self._more_beside(chunk) for chunk in self)

    @property
    def beside_bytes(self) -> int:
        """Largest number of bytes of the others while one runs backward."""
        return ceil((self[0].in_flight - 1) * self.most_resident_bytes)

    def _more_beside(self, chunk: Solved) -> int:
        """Return the bytes by which the others exceed as many chunks like this one."""
        counted = chunk.resident_bytes if chunk.in_flight == self[0].in_flight else 0
        return ceil((self[0].in_flight - 1) * (self.most_resident_bytes - counted))


class Share(NamedTuple):
    """Requested offload, as a fraction of every chunk's resident bytes."""

    ratio: float
    within: bool = False
    """Whether it goes within its own micro-batch (`solver.offload`) instead of between passes."""


class Leaving(NamedTuple):
    """Offload of one chunk within each micro-batch's own forward; it comes back within its own backward (`runtime.offload`)."""

    bytes: int = 0
    pace_bytes: int = 1
    """Bytes copied during one half's forward."""
    sections: tuple[Section, ...] = ()
    """Of the halves of which something leaves."""


@dataclass(frozen=True)
class StageAnswer:
    """Answer for one stage. Seconds are for one micro-batch through all its chunks, except for `exposed_copies_s`."""

    stage: int
    chunks: SolvedChunks
    in_flight: int
    """Largest number of chunks between their forward and their backward."""
    asked: Share
    stock: Passes
    """Forward and backward without recomputation."""
    exposed_copies_s: float = 0.0
    """Seconds of a whole step in which passes wait for copies between passes."""
    host_sets: tuple[int, ...] = ()
    """Micro-batches of each chunk in host memory at once."""
    received_bytes: int = 0
    """Input of a micro-batch from the stage before. Megatron holds it, so it stays on the device."""
    offloaded_share: float = 0.0
    """Smallest offloaded fraction of a chunk's resident bytes: as requested, or all that can be moved."""
    host: Passes = NO_HOST_TIME
    """Host seconds to issue it; 0 if unknown."""
    leaving: tuple[Leaving, ...] = ()
    """Offload within micro-batches, by chunk; then nothing is offloaded between passes."""
    spared_bytes: int = 0
    """Bytes of all micro-batches in flight that are away when the last half of one ends its forward and begins its backward."""
    whole: int = 0
    """Micro-batches in flight that keep everything. Bytes and seconds are of the others."""

    @property
    def host_late_s(self) -> float:
        """Seconds that its passes take longer because the host is slower than the device."""
        return self.host.beyond(self.stock.forward_s, self.stock.backward_s + self.longer_s)

    @property
    def longer_s(self) -> float:
        """Seconds that its passes take longer on the device than without recomputation; negative if they take less."""
        return sum(chunk.longer_s for chunk in self.chunks)

    @property
    def peak_bytes(self) -> int:
        """Peak of all its layers with all chunks in flight, with the loss included. A simulation finds no more."""
        return self.chunks.peak_bytes - self.spared_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned, of one rank."""
        return sum(sets * self.offloaded_bytes(chunk) for chunk, sets in enumerate(self.host_sets))

    def offloaded_bytes(self, chunk: int) -> int:
        if self.leaving:
            return self.leaving[chunk].bytes
        return min(int(self.asked.ratio * self.chunks[chunk].resident_bytes), self._movable_bytes(chunk))

    @property
    def movable_share(self) -> float:
        """Fraction of a chunk's resident bytes that can be offloaded, the least over chunks."""
        return min(
            (
                self._movable_bytes(at) / max(1, chunk.resident_bytes)
                for at, chunk in enumerate(self.chunks.beside_each_other)
                if chunk.halves
            ),
            default=0.0,
        )

    def _movable_bytes(self, chunk: int) -> int:
        received = 0 if (self.stage, chunk) == (0, 0) else self.received_bytes
        return max(0, self.chunks[chunk].movable_bytes - received)

    def seconds(self, microbatches: int) -> float:
        """Return the seconds of one micro-batch, with its part of the exposed copies."""
        return self.stock.both_s + self.longer_s + self.host_late_s + self.exposed_copies_s / microbatches
