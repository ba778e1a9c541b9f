"""What a solver answers: one choice for each half of each layer of a stage.

Where nothing fits there is no answer: `Infeasible` is raised, and says what binds and by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megatron_lynx.cost.memory import HalfMemory, peak_bytes, resident_bytes
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
    def resident_bytes(self) -> int:
        return sum(half.memory.resident for half in self.halves)


def layers_of(halves: Sequence[Option]) -> tuple[LayerChoice, ...]:
    """Options of halves in forward order, put together as layers."""
    each = iter(halves)
    return tuple(map(LayerChoice, each, each))


@dataclass(frozen=True)
class WholeMicroBatches:
    """Of every `of_every` micro-batches the first `count` keep everything and replay nothing (Korthikanti et al., appendix C)."""

    count: int
    of_every: int
    resident_bytes: int
    """What one of them holds from forward to backward."""
    peak_bytes: int
    """The most that one of them holds at once, the loss included."""

    @property
    def replaying_share(self) -> float:
        return 1 - self.count / self.of_every


@dataclass(frozen=True)
class Solved:
    """The choices for a stage's layers, first to last.

    Seconds are those of one micro-batch, the mean over all of them where some are whole. Bytes are those of one micro-batch that
    replays, but for `peak_bytes`, which counts all in flight.
    """

    layers: tuple[LayerChoice, ...]
    in_flight: float
    gap: float | None = None
    """The part of its exposed seconds that a faster answer could save at most: 0 where none is faster, None where unknown."""
    whole: WholeMicroBatches | None = None
    cooldown_peak_bytes: int = 0
    """The most that is held in cool-down, where that is more than the options say (`solver.receive`)."""
    loss_bytes: int = 0
    """What the loss holds before backward reaches the layers, beyond what is held beside them then (`StageProblem`)."""

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
        return self._replaying_share * sum(half.exposed_s for half in self.halves)

    @cached_property
    def longer_s(self) -> float:
        """By how much a micro-batch takes longer than if everything were kept; below 0 where it takes less."""
        return self._replaying_share * sum(half.longer_s for half in self.halves)

    @cached_property
    def hidden_s(self) -> float:
        return self._replaying_share * sum(half.hidden_s for half in self.halves)

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
        """While a micro-batch that replays runs backward, or one that is whole, with all others that are in flight beside it; or
        while the loss is computed."""
        if self.whole is None:
            return max(self.cooldown_peak_bytes, peak_bytes(self.backward_order, self.in_flight, self.loss_bytes))
        count, others = self.whole.count, self.whole.of_every - self.whole.count
        replaying = count * self.whole.resident_bytes + peak_bytes(self.backward_order, others, self.loss_bytes)
        whole = (count - 1) * self.whole.resident_bytes + self.whole.peak_bytes + others * self.resident_bytes
        return max(replaying, whole)

    @cached_property
    def flops(self) -> int:
        """What one micro-batch that replays computes again."""
        return sum(half.flops for half in self.halves)

    @property
    def _replaying_share(self) -> float:
        return 1.0 if self.whole is None else self.whole.replaying_share


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
