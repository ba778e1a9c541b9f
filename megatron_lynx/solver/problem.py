"""What one stage asks of a solver.

    StageProblem
      ├── attention   every layer's attention half       Choices: Option, Option, ...   a replayed subset and its Seat
      ├── mlp         the MLP halves but the last
      ├── last_mlp    the stage's last MLP half: no backward of this stage comes before it
      ├── mixed       where halves are filled otherwise, with experts, say: the choices of each
      └── in_flight, budget_bytes, loss_bytes

An option is a set of replayed items, or a checkpoint of the half, with what follows from it. Its seat says where that replay
runs, and how much of it the windows there hide (`solver.placement`). Seconds and bytes are those of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds
from megatron_lynx.cost.memory import COLUMNS, HalfMemory
from megatron_lynx.cost.replay import Checkpoint
from megatron_lynx.cost.stage import StageSeconds
from megatron_lynx.solver.placement import Seat
from megatron_lynx.units import SECOND_DIGITS

Floats = NDArray[np.float64]
Numbers = int | NDArray[np.intp]
"""Positions of options in a table."""

ENDLESS = 1e100
"""Larger figures are cut to this one, so that sums of them stay finite."""


@dataclass(frozen=True)
class Option:
    """One choice for one half."""

    replay: tuple[str, ...]
    memory: HalfMemory
    seat: Seat
    replay_s: float
    exposed_s: float
    flops: int
    cooldown_memory: HalfMemory | None = None
    """What it holds in cool-down; None: the same."""
    host: HostSeconds = NO_HOST_TIME
    """How long the host takes to issue the half so."""
    checkpoint: Checkpoint | None = None
    """Of a half that keeps its input at most. `replay` is then all that runs again."""

    @property
    def joined(self) -> bool:
        """Whether both halves of a layer take it together: that the layer is checkpointed, and keeps one input."""
        return self.checkpoint is not None and (self.checkpoint.feeds or self.checkpoint.fed)

    @property
    def longer_s(self) -> float:
        """By how much its backward takes longer than if all of it were kept; below 0 where it takes less, because a gather for
        the replay spares it a longer wait."""
        return self.exposed_s - self.seat.spared_s

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.replay_s - self.exposed_s)


def received_memory(option: Option) -> HalfMemory:
    """What a half holds that is wholly regenerated while its gradient is received."""
    return replace(option.memory, early=option.memory.regenerated, ahead=(0, 0, 0, 0))


class Columns(NamedTuple):
    """What many options cost, side by side."""

    longer_s: Floats
    resident: Floats
    moments: Floats
    """(options, `cost.memory.COLUMNS`): what each holds of one micro-batch."""

    def at(self, numbers: Numbers | slice) -> Columns:
        return Columns(*(column[numbers] for column in self))


def unbeaten(costs: Sequence[Floats]) -> NDArray[np.intp]:
    """Positions that no other one beats or equals in every cost. Of equals the first stays."""
    table = np.array(costs)
    no_worse = (table[:, :, None] <= table[:, None, :]).all(axis=0)
    later = np.tri(table.shape[1], k=-1, dtype=bool).T
    return np.flatnonzero(~(no_worse & (later | ~no_worse.T)).any(axis=0))


class Choices(tuple[Option, ...]):
    """Every option of one kind of half, with what is worked out about them once."""

    @cached_property
    def columns(self) -> Columns:
        """Their costs. Float64 counts bytes up to 2^53 exactly. Seconds that are no number count as `ENDLESS`."""
        rows = [(round(each.longer_s, SECOND_DIGITS), each.memory.resident, *each.memory.columns) for each in self]
        table = np.fmin(np.array(rows, dtype=np.float64).reshape(len(rows), 2 + len(COLUMNS)), ENDLESS)
        return Columns(table[:, 0], table[:, 1], table[:, 2:])

    @cached_property
    def joined(self) -> Choices:
        """Those that both halves of a layer take together."""
        return Choices(option for option in self if option.joined)

    @cached_property
    def apart(self) -> Choices:
        """Those that a half may take whatever the layer's other one does."""
        return Choices(option for option in self if not option.joined)

    @cached_property
    def plain(self) -> Choices:
        """Those without checkpoints."""
        return Choices(option for option in self if option.checkpoint is None)

    @cached_property
    def in_backward(self) -> Choices:
        """Those of which nothing is replayed before the stage's own backward begins."""
        return Choices(option for option in self if not option.seat.begins_early)

    @cached_property
    def unbeaten(self) -> Choices:
        """Those that no other one beats or equals in time and in every kind of memory, then those of whole layers."""
        columns = self.apart.columns
        return Choices((*(self.apart[number] for number in unbeaten((*columns[:2], *columns.moments.T))), *self.joined))

    @cached_property
    def best_seated(self) -> Choices:
        """Every set of replayed items once, in the seat that hides most of it.

        Windows in which the half is regenerated before the stage's backward begins are left out, because they hold memory longer.
        """
        subsets: dict[object, Option] = {}
        for option in self:
            known = subsets.get(key := (option.replay, option.checkpoint))
            if not option.memory.early and (known is None or option.longer_s < known.longer_s):
                subsets[key] = option
        return Choices(subsets.values())

    def replaying(self, items: Set[str]) -> Option:
        """The option on demand that replays these items, and as few others as possible."""
        wanted = [option for option in self.plain if items <= set(option.replay) and option.seat.steady.on_demand]
        return min(wanted, key=lambda option: len(option.replay))


@dataclass(frozen=True)
class Receive:
    """The wait for a gradient in cool-down, which the replays of several halves can share."""

    seconds: float
    interference: float
    """How many times longer a replay takes in it."""
    share: float
    """The part of the micro-batches whose backward is in cool-down."""
    in_flight: float
    """Micro-batches that hold activations when the first of those backwards begins."""


class MixedHalf(NamedTuple):
    """One half of a stage whose layers differ."""

    usual: bool
    """Whether the half's usual section fills it, and not one that only some layers have."""
    choices: Choices
    """They depend on what fills the half whose backward comes before, too."""


@dataclass(frozen=True)
class Mixed:
    """A stage that has more in its halves than what is usual: experts, or what nobody looks into."""

    halves: tuple[MixedHalf, ...]
    """In forward order."""

    @property
    def plain(self) -> Mixed:
        """Without checkpoints."""
        return self.each(lambda choices: choices.plain)

    @property
    def best_seated(self) -> Mixed:
        """With every set of replayed items in the seat that hides most of it."""
        return self.each(lambda choices: choices.best_seated)

    def each(self, made: Callable[[Choices], Choices]) -> Mixed:
        """With other choices, made once of equal ones."""
        kinds = {id(half.choices): half.choices for half in self.halves}
        known = {key: made(choices) for key, choices in kinds.items()}
        return Mixed(tuple(half._replace(choices=known[id(half.choices)]) for half in self.halves))


class Grouped(NamedTuple):
    """A half in a group of layers that keep one input."""

    edge: Option
    """As the group's first half, or its last one."""
    inside: Option


@dataclass(frozen=True)
class StageProblem:
    """The question about one stage. `budget_bytes` bounds what its layers hold at once; without it the least memory is wanted."""

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
    """None where all halves are filled as usual."""
    device: StageSeconds | None = None
    """One micro-batch on the device, nothing replayed. None where the host's time is not known."""
    forward_s: float = 0.0
    """Seconds of its layers' forward, for one micro-batch."""
    loss_bytes: int = 0
    """What the loss holds while all of this is kept, before backward reaches it, beyond what is held beside the layers then."""
    inside: tuple[Grouped | None, ...] = ()
    """Every half, in forward order, as it is in a group of layers that keep one input; None where none can be. Empty where no
    group is to be made (`solver.groups`)."""
    last_attention: Choices | None = None
    """What each attention half is in the stage's last layer, where fewer windows come before it; None: the same."""

    def at_top(self, option: Option) -> Option:
        """What an attention half that is chosen like this is in the last layer."""
        return option if self.last_attention is None else self._at_top[option]

    @cached_property
    def _at_top(self) -> dict[Option, Option]:
        assert self.last_attention is not None
        return dict(zip(self.attention, self.last_attention, strict=True))

    @property
    def best_seated(self) -> StageProblem:
        """With every replay in the window of its backward that hides most of it: leaving a window empty saves no memory."""
        mixed = None if self.mixed is None else self.mixed.best_seated
        attention = self.attention.best_seated
        top = None if self.last_attention is None else Choices(map(self.at_top, attention))
        return replace(self, attention=attention, mlp=self.mlp.best_seated, mixed=mixed, last_attention=top)

    @property
    def in_backward(self) -> StageProblem:
        """With nothing replayed before its own backward begins: where what a micro-batch keeps comes back within that."""
        mixed = None if self.mixed is None else self.mixed.each(lambda choices: choices.in_backward)
        attention = self.attention.in_backward
        top = None if self.last_attention is None else Choices(map(self.at_top, attention))
        mlp, last_mlp = self.mlp.in_backward, self.last_mlp.in_backward
        return replace(self, attention=attention, mlp=mlp, last_mlp=last_mlp, mixed=mixed, last_attention=top, receive=None)

    @property
    def plain(self) -> StageProblem:
        """Without checkpoints."""
        mixed, top = self.mixed and self.mixed.plain, self.last_attention and self.last_attention.plain
        return replace(
            self,
            attention=self.attention.plain,
            mlp=self.mlp.plain,
            last_mlp=self.last_mlp.plain,
            mixed=mixed,
            inside=(),
            last_attention=top,
        )

    @cached_property
    def halves(self) -> tuple[Choices, ...]:
        """The choices of every half, in forward order."""
        if self.mixed is None:
            return (self.attention, self.mlp) * (self.layers - 1) + (self.last_attention or self.attention, self.last_mlp)
        return tuple(half.choices for half in self.mixed.halves)
