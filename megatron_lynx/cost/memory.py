"""How much memory the layers of one stage hold, and when.

    one micro-batch, layers 1 and 2, backward order:     mlp(2)   attention(2)   mlp(1)   attention(1)
    [A] backward of a half begins: it is whole, those behind it are what they keep
           whole  +  resident       +  resident  +  resident
    [B] in its window the next one is regenerated, when of itself only its inputs are still needed
           tail   +  whole          +  resident  +  resident
    The other micro-batches in flight hold their resident parts all the while.

A half's resident part is its input, what its kept items save, and the outputs of kept sites that a replay passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_lynx.cost.replay import Replay
from megatron_lynx.items import COLUMN_PARALLEL, Half
from megatron_lynx.profiler.profile import HalfProfile


@dataclass(frozen=True)
class HalfMemory:
    """One half of one micro-batch. Bytes."""

    resident: int
    """From forward to backward."""
    regenerated: int
    """What its replay adds, a gathered input included: the size of its frame."""
    tail: int
    """What its backward still needs at its last collective: its input, and its column-parallel linear's."""

    @property
    def whole(self) -> int:
        return self.resident + self.regenerated


def half_memory(half: Half, profile: HalfProfile, replay: Replay, gathered_bytes: int = 0) -> HalfMemory:
    """`gathered_bytes`: the buffer of an input that is gathered once (sequence parallelism)."""
    argument = sum(tensor.bytes for tensor in profile.tensors if COLUMN_PARALLEL[half] in tensor.saved_by)
    return HalfMemory(
        resident=profile.input_bytes + replay.stays_bytes,
        regenerated=replay.regenerated_bytes + gathered_bytes,
        tail=profile.input_bytes + argument + gathered_bytes,
    )


def resident_bytes(halves: Iterable[HalfMemory]) -> int:
    return sum(half.resident for half in halves)


def peak_bytes(backward_order: Sequence[HalfMemory], in_flight: int, ahead: bool) -> int:
    """The most that the stage's layers hold. `ahead`: whether halves are regenerated before their backward begins ([B])."""
    total = resident_bytes(backward_order)
    behind, peak = total, total
    for index, half in enumerate(backward_order):
        behind -= half.resident
        peak = max(peak, behind + half.whole)  # [A]
        if ahead and index + 1 < len(backward_order):
            peak = max(peak, behind + half.tail + backward_order[index + 1].regenerated)  # [B]
    return peak + (in_flight - 1) * total
