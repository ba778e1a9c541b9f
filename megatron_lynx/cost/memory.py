"""How much memory the layers of one stage hold, and when.

    one micro-batch, layers 1 and 2, backward order:     mlp(2)   attention(2)   mlp(1)   attention(1)
    [A] backward of a half begins: it is whole, those behind it are what they keep
           whole  +  resident       +  resident  +  resident
    [B] in its last window the next one is regenerated, when of itself only its inputs are still needed
           tail   +  whole          +  resident  +  resident
    What is regenerated in other windows, or gathered behind them, is there at [A], too. A replay may run in windows of the two
    halves before: what of it is there at which of their moments is `ahead`, `ahead2`, ...

        moments        mlp(3) [A] [B]    attention(3) [A] [B]    mlp(2) [A]
        of mlp(2)        ahead4  ahead3          ahead2  ahead    whole

    The other micro-batches in flight hold their resident parts all the while. What is regenerated early, while a forward or a
    receive still waits, is there from before the first backward until its own, once: only one micro-batch's backward comes next.

A half's resident part is its input, what its kept items save, and the outputs of kept sites that a replay passes. Of that, blocks
large enough can go to the host (`smallest_offloaded_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.replay import Replay
from megatron_lynx.profiler.profile import HalfProfile
from megatron_lynx.units import MIB


@dataclass(frozen=True)
class HalfMemory:
    """What one half holds of one micro-batch, in bytes."""

    resident: int
    """What is held from forward to backward."""
    regenerated: int
    """What its replay adds, a gathered input included: the size of its frame."""
    tail: int
    """What its backward still needs at its last collective: its input, and its column-parallel linear's. Without collectives:
    everything."""
    ahead: int = 0
    """What is there when the half before ends, of what is regenerated or gathered: all, a part, or nothing."""
    early: int = 0
    """What is there before the stage's first backward begins, and then until its own. It is in none of the other parts."""
    movable: int = 0
    """The part of the resident bytes that can go to the host."""
    ahead2: int = 0
    """What is there when the half before begins."""
    ahead3: int = 0
    """What is there when the half before that ends."""
    ahead4: int = 0
    """What is there when that begins."""

    @property
    def whole(self) -> int:
        return self.resident + self.regenerated

    @property
    def held(self) -> int:
        """What is held while backward is on its way to the half."""
        return self.resident + self.early


NOTHING = HalfMemory(0, 0, 0)

AHEAD = ("ahead", "ahead2", "ahead3", "ahead4")
"""By how many moments before its own backward begins."""


def half_memory(
    section: Section, profile: HalfProfile, replay: Replay, *, gathered_bytes: int = 0, exchanging: bool = False
) -> HalfMemory:
    """A half that is replayed on demand. `gathered_bytes`: the buffer of an input that is gathered once. `exchanging`: whether
    its windows are exchanges of tokens."""
    resident, regenerated = profile.input_bytes + replay.stays_bytes, replay.regenerated_bytes + gathered_bytes
    return HalfMemory(
        resident=resident,
        regenerated=regenerated,
        tail=_argument_bytes(section, profile) + gathered_bytes if section.has_windows or exchanging else resident + regenerated,
        movable=movable_bytes(profile, replay, smallest_offloaded_bytes(profile.input_bytes)),
    )


def _argument_bytes(section: Section, profile: HalfProfile) -> int:
    """A half's input, and its column-parallel linear's; of experts everything that is read behind their dispatch's backward, of
    latent attention all that comes before its heads."""
    read = {section.column_parallel}
    if section.two_paths:
        read = {*section.names[: section.index(section.inner[0])]}
    elif not section.has_windows:
        read = {*section.names[: section.index(section.item("dispatch").name)]}
    return profile.input_bytes + sum(tensor.bytes for tensor in profile.tensors if not read.isdisjoint(tensor.saved_by))


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


def _threes(halves: Sequence[HalfMemory]) -> Iterator[tuple[HalfMemory, HalfMemory, HalfMemory]]:
    """Each half with the two behind it."""
    behind = [*halves[1:], NOTHING, NOTHING]
    return zip(halves, behind, behind[1:], strict=False)


def peak_bytes(backward_order: Sequence[HalfMemory], in_flight: float, loss_bytes: int = 0) -> int:
    """The most that the stage's layers hold at once, over all micro-batches in flight.

    `in_flight` need not be whole: what is offloaded counts for less than one micro-batch (Yuan et al.). `loss_bytes`: what the
    loss holds before backward reaches the layers, beyond what is held beside them then.
    """
    behind = sum(half.held for half in backward_order)
    peak = behind + loss_bytes
    for half, first, second in _threes(backward_order):
        behind -= half.held
        begins, ends = half.whole + first.ahead2 + second.ahead4, half.tail + first.ahead + second.ahead3
        peak = max(peak, behind + begins, behind + ends)  # [A] [B]
    return peak + math.ceil((in_flight - 1) * resident_bytes(backward_order))
