"""How much memory the layers of one stage hold, and when.

    one micro-batch, layers 1 and 2, backward order:     mlp(2)   attention(2)   mlp(1)   attention(1)
    [A] backward of a half begins: it is whole, those behind it are what they keep
           whole  +  resident       +  resident  +  resident
    [B] in its last window the next one is regenerated, when of itself only its inputs are still needed
           tail   +  whole          +  resident  +  resident
    The other micro-batches in flight hold their resident parts all the while. What is regenerated early, while a forward or a
    receive still waits, is there from before the first backward until its own, once: only one micro-batch's backward comes next.

A half's resident part is its input, what its kept items save, and the outputs of kept sites that a replay passes. Of that, blocks
large enough can go to the host (`smallest_offloaded_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.replay import Replay
from megatron_lynx.profiler.profile import ExpertHalf, HalfProfile
from megatron_lynx.units import MIB


@dataclass(frozen=True)
class HalfMemory:
    """What one half holds of one micro-batch, in bytes."""

    resident: int
    """What is held from forward to backward."""
    regenerated: int
    """What its replay adds, a gathered input included: the size of its frame."""
    tail: int
    """What its backward still needs at its last collective: its input, and its column-parallel linear's."""
    ahead: int = 0
    """What is there when the half before ends: all that is regenerated, or a gathered input alone, or nothing."""
    early: int = 0
    """What is there before the stage's first backward begins, and then until its own: all that is regenerated, or nothing."""
    movable: int = 0
    """The part of the resident bytes that can go to the host."""

    @property
    def whole(self) -> int:
        return self.resident + self.regenerated

    @property
    def held(self) -> int:
        """What is held while backward is on its way to the half."""
        return self.resident + self.early


NOTHING = HalfMemory(0, 0, 0)


def half_memory(section: Section, profile: HalfProfile, replay: Replay, *, gathered_bytes: int = 0) -> HalfMemory:
    """A half that is replayed on demand. `gathered_bytes`: the buffer of an input that is gathered once."""
    argument = sum(tensor.bytes for tensor in profile.tensors if section.column_parallel in tensor.saved_by)
    return HalfMemory(
        resident=profile.input_bytes + replay.stays_bytes,
        regenerated=replay.regenerated_bytes + gathered_bytes,
        tail=profile.input_bytes + argument + gathered_bytes,
        ahead=gathered_bytes,
        movable=movable_bytes(profile, replay, smallest_offloaded_bytes(profile.input_bytes)),
    )


def expert_memory(profile: ExpertHalf) -> HalfMemory:
    """A mixture of experts: kept whole to the end of its backward, and on the device."""
    return HalfMemory(resident=profile.saved_bytes, regenerated=0, tail=profile.saved_bytes)


def smallest_offloaded_bytes(input_bytes: int) -> int:
    """What a plan lets go to the host begins here: 1 MiB (Yuan et al.), or less in layers of which that would be a large part.

    `input_bytes`: of one layer.
    """
    return min(MIB, input_bytes // 4)


def movable_bytes(profile: HalfProfile, replay: Replay, smallest_bytes: int) -> int:
    """How much of a half can go to the host: its input and what stays, but for small blocks and arguments that layers share."""
    blocks = [profile.input_bytes, *(tensor.bytes for tensor in replay.stays if tensor.made_by != "input")]
    return sum(size for size in blocks if size >= smallest_bytes)


def resident_bytes(halves: Iterable[HalfMemory]) -> int:
    return sum(half.resident for half in halves)


def peak_bytes(backward_order: Sequence[HalfMemory], in_flight: float, loss_bytes: int = 0) -> int:
    """The most that the stage's layers hold at once, over all micro-batches in flight.

    `in_flight` need not be whole: what is offloaded counts for less than one micro-batch (Yuan et al.). `loss_bytes`: what the
    loss holds before backward reaches the layers, beyond what is held beside them then.
    """
    behind = sum(half.held for half in backward_order)
    peak = behind + loss_bytes
    for half, following in pairwise((*backward_order, NOTHING)):
        behind -= half.held
        peak = max(peak, behind + half.whole, behind + half.tail + following.ahead)  # [A] [B]
    return peak + math.ceil((in_flight - 1) * resident_bytes(backward_order))
