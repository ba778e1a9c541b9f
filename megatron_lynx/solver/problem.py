"""What one stage asks of a solver.

    StageProblem
      ├── attention   every layer's attention half       Choices: Option, Option, ...   a replayed subset and its Seat
      ├── mlp         the MLP halves but the last
      ├── last_mlp    the stage's last MLP half: no backward of this stage comes before it
      ├── mixed       where some layers have experts: which, and the choices of their halves
      └── in_flight, budget_bytes

An option is a set of replayed items with what follows from it. A seat is where that replay runs and how much of it the window
there hides; a window has one seat. Seconds and bytes are those of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.solver.placement import Seat

Floats = NDArray[np.float64]
Numbers = int | NDArray[np.intp]
"""Which options of a table are meant."""

SECOND_DIGITS = 12
"""Seconds that agree to a picosecond are equal: sums of floats in another order must not decide."""

ENDLESS = 1e100
"""A figure beyond this is as bad as this one, and sums of it stay finite."""


@dataclass(frozen=True)
class Option:
    """One choice for one half."""

    replay: tuple[str, ...]
    memory: HalfMemory
    seat: Seat
    replay_s: float
    exposed_s: float
    flops: int

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.replay_s - self.exposed_s)


class Columns(NamedTuple):
    """What options cost, each of it as an array."""

    exposed_s: Floats
    resident: Floats
    whole: Floats
    tail: Floats
    ahead: Floats
    early: Floats

    @property
    def held(self) -> Floats:
        return self.resident + self.early

    def at(self, numbers: Numbers) -> Columns:
        return Columns(*(column[numbers] for column in self))


def unbeaten(costs: Sequence[Floats]) -> NDArray[np.intp]:
    """The numbers of those that no other one beats or equals (the first of equals stays) in every cost."""
    table = np.array(costs)
    no_worse = (table[:, :, None] <= table[:, None, :]).all(axis=0)
    later = np.tri(table.shape[1], k=-1, dtype=bool).T
    return np.flatnonzero(~(no_worse & (later | ~no_worse.T)).any(axis=0))


class Choices(tuple[Option, ...]):
    """Every choice for one kind of half. What is worked out about them is kept with them."""

    @cached_property
    def columns(self) -> Columns:
        """Float64 counts bytes up to 2^53 exactly. Seconds that are no number count as endless."""
        rows = [_costs(option) for option in self]
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 6)
        return Columns(*np.fmin(table, ENDLESS).T)

    @cached_property
    def unbeaten(self) -> Choices:
        """Without those that another one beats or equals (the first of equals stays) in time and in every kind of memory."""
        return Choices(self[number] for number in unbeaten(self.columns))

    @cached_property
    def best_seated(self) -> Choices:
        """Every subset in the seat that hides most of it, in which it is not early: memory that only haste costs is not held."""
        subsets: dict[tuple[str, ...], Option] = {}
        for option in self:
            known = subsets.get(option.replay)
            if not option.memory.early and (known is None or option.exposed_s < known.exposed_s):
                subsets[option.replay] = option
        return Choices(subsets.values())

    def replaying(self, *items: str) -> Option:
        """The one on demand that replays these items and, of such, fewest others."""
        wanted = [option for option in self if set(items) <= set(option.replay) and option.seat.steady.on_demand]
        return min(wanted, key=lambda option: len(option.replay))


def _costs(option: Option) -> tuple[float, ...]:
    memory = option.memory
    return round(option.exposed_s, SECOND_DIGITS), memory.resident, memory.whole, memory.tail, memory.ahead, memory.early


@dataclass(frozen=True)
class Receive:
    """The wait for a gradient in cool-down, which the replays of several halves can share."""

    seconds: float
    interference: float
    """How many times longer a replay takes in it."""
    share: float
    """The part of the micro-batches whose backward is in cool-down."""
    in_flight: float
    """Micro-batches that are there when the first of those begins."""


@dataclass(frozen=True)
class Mixed:
    """A stage some of whose layers have experts, or all."""

    layers: tuple[bool, ...]
    """Whether each has, from the first layer on."""
    attention: Choices
    """Of the attention halves below experts, which have no windows to hide anything."""
    experts: Option
    """All of a mixture is kept."""


@dataclass(frozen=True)
class StageProblem:
    """One stage. `budget_bytes` bounds what its layers hold at once; without one the least memory is wanted."""

    stage: int
    layers: int
    attention: Choices
    mlp: Choices
    last_mlp: Choices
    in_flight: float = 1
    """Micro-batches whose resident bytes are held at once; below their number where a share is offloaded."""
    budget_bytes: int | None = None
    receive: Receive | None = None
    """None on the last stage."""
    mixed: Mixed | None = None
    """None where no layer has experts."""

    @cached_property
    def halves(self) -> tuple[Choices, ...]:
        """The choices of every half, in forward order."""
        if self.mixed is None:
            return (self.attention, self.mlp) * (self.layers - 1) + (self.attention, self.last_mlp)
        choices: list[Choices] = []
        kept = Choices((self.mixed.experts,))
        for number, experts in enumerate(self.mixed.layers, start=1):
            own = self.last_mlp if number == self.layers else self.mlp
            choices += (self.mixed.attention, kept) if experts else (self.attention, own)
        return tuple(choices)
