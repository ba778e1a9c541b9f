"""A stage as the solver sees it: options of each half of its layers. Seconds and bytes are of one micro-batch on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.config.job import Policy
from megatron_lynx.cost.host import NO_HOST_TIME
from megatron_lynx.cost.memory import COLUMNS, HalfMemory
from megatron_lynx.cost.recompute import Checkpoint, recomputed_items
from megatron_lynx.timeline import Passes
from megatron_lynx.units import SECOND_DIGITS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Option:
    recompute: tuple[str, ...]
    memory: HalfMemory
    window: str | None
    """Window in which it is recomputed; None: on demand, when backward needs its first tensor."""
    gather: str | None
    """Collective after which its input is gathered once (sequence parallelism); None: it is not."""
    recompute_s: float
    exposed_s: float
    spared_s: float
    """Seconds by which its backward waits less for its input, because it was gathered before."""
    flops: int
    host: Passes = NO_HOST_TIME
    """Host seconds to issue the half."""
    checkpoint: Checkpoint | None = None
    """Checkpoint of a half, which keeps its input at most; `recompute` then lists everything that runs again."""

    @property
    def feeds(self) -> bool:
        """Whether the next half keeps no input."""
        return self.checkpoint is not None and self.checkpoint.feeds

    @property
    def fed(self) -> bool:
        """Whether it keeps no input itself."""
        return self.checkpoint is not None and self.checkpoint.fed

    @property
    def joined(self) -> bool:
        """Whether both halves of a layer take it together: the layer is checkpointed and keeps one input."""
        return self.feeds or self.fed

    @property
    def begins_ahead(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.ahead_to is not None

    @property
    def longer_s(self) -> float:
        """Seconds that its backward takes longer than without recomputation. Negative if a gather for recomputation saves a
        longer wait."""
        return self.exposed_s - self.spared_s

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.recompute_s - self.exposed_s)


WAIT_S = 1e-9
"""Seconds that count for each half that hides recomputation in waits, and for each wait that a weight gradient lets pass, less
than any work takes: of equally fast answers, one that leaves the most waits to weight gradients is taken. Taking the one with the
fewest bytes as well and keeping the better plan makes steps of 76 rows 0.06 % shorter in the mean and 0.7 % at best, one other
launch's 1.1 %, in half as much again time."""


def unbeaten(costs: Sequence[Floats]) -> NDArray[np.intp]:
    """Return the positions that no other one beats or equals in every cost. Ties go to the first."""
    table = np.array(costs)
    no_worse = (table[:, :, None] <= table[:, None, :]).all(axis=0)
    later = np.tri(table.shape[1], k=-1, dtype=bool).T
    return np.flatnonzero(~(no_worse & (later | ~no_worse.T)).any(axis=0))


class Choices(tuple[Option, ...]):
    """All options of one kind of half. Equal only to itself, so that a problem is found fast among those solved before."""

    __eq__, __hash__ = object.__eq__, object.__hash__

    @cached_property
    def costs(self) -> Floats:
        """(options, 3 + `cost.memory.COLUMNS`): seconds longer, the host's of a forward and a backward, bytes at each moment.
        Float64 counts bytes exactly up to 2^53. NaN and larger figures count as the largest float32."""
        rows = [
            (
                round(option.longer_s + WAIT_S * (option.hidden_s > 0), SECOND_DIGITS),
                option.host.forward_s,
                option.host.backward_s,
                *option.memory.columns,
            )
            for option in self
        ]
        return np.fmin(np.array(rows, dtype=np.float64).reshape(len(rows), 3 + len(COLUMNS)), np.finfo(np.float32).max)

    @cached_property
    def joined(self) -> Choices:
        return Choices(option for option in self if option.joined)

    @cached_property
    def apart(self) -> Choices:
        return Choices(option for option in self if not option.joined)

    @cached_property
    def plain(self) -> Choices:
        return Choices(option for option in self if option.checkpoint is None)

    @cached_property
    def unbeaten(self) -> Choices:
        """Those that no other one beats or equals in time, in time of the host and in every kind of memory, then those of whole
        layers."""
        longer_s, *host_s = self.apart.costs.T[:3]
        numbers = unbeaten([longer_s, sum(host_s), *self.apart.costs.T[3:]])
        return Choices((*(self.apart[number] for number in numbers), *self.joined))

    def recomputing(self, items: Set[str]) -> Option:
        """Return the option that recomputes most of these items, and as few others as possible, on demand."""
        first = max(self.plain, key=lambda option: (len(items & {*option.recompute}), -len(option.recompute)))
        memory = replace(first.memory, ahead=(0, 0, 0, 0))
        return replace(first, gather=first.gather and ON_DEMAND, spared_s=0.0, memory=memory)

    @property
    def items(self) -> Set[str]:
        """Every item that some option recomputes."""
        return {item for option in self for item in option.recompute}


@dataclass(frozen=True, eq=False)
class Grouped:
    """A half in a group of layers that keep one input."""

    edge: Option
    """As the group's first half, or its last one."""
    inside: Option


@dataclass(frozen=True)
class StageProblem:
    """`budget_bytes` bounds what its layers hold at once; if it is None, the least memory is sought."""

    stage: int
    halves: tuple[Choices, ...]
    """Choices of every half, in forward order. Those of halves that are alike are one object."""
    in_flight: float = 1
    """Micro-batches whose resident bytes are held at once; less than their number if a fraction is offloaded."""
    budget_bytes: int | None = None
    device: Passes | None = None
    """One micro-batch on the device without recomputation; None if host seconds are unknown."""
    forward_s: float = 0.0
    """Seconds of its layers' forward, for one micro-batch."""
    leaving: bool = False
    """Whether bytes are offloaded within their own micro-batch, those of the lowest layers first."""
    loss_bytes: int = 0
    """Bytes of the loss before backward reaches the layers, in addition to other bytes beside the layers at that moment."""
    inside: tuple[Grouped | None, ...] = ()
    """Every half, in forward order, as it is in a group of layers that keep one input; None where none can be. Empty where no
    group is to be made (`solver.programme`)."""

    @property
    def layers(self) -> int:
        return len(self.halves) // len(HALVES)

    def under(self, policy: Policy) -> StageProblem:
        """Return the problem with one choice for each half: what a named policy recomputes, on demand.

        Our runtime never repeats a row-parallel GEMM and its reduction, and keeps the input of both halves of a layer, so `full`
        is faster than stock Megatron's and holds more. Code between submodules runs again as well: `selective` recomputes the
        rotary embedding with the core attention. Raises `KeyError` for `planned`.
        """
        items = set(recomputed_items(policy))
        everything = policy == "full"
        chosen = self.with_choices(lambda each: Choices([each.recomputing(each.plain.items if everything else items)]))
        return replace(chosen, inside=())

    def with_choices(self, made: Callable[[Choices], Choices]) -> StageProblem:
        """Return the problem with other choices. Equal choices are converted once."""
        changed = {choices: made(choices) for choices in self.halves}
        return replace(self, halves=tuple(changed[choices] for choices in self.halves))
