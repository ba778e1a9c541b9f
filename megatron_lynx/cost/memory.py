"""How much memory the layers of one stage hold, and when.

    one micro-batch, layers 1 and 2, backward order:     mlp(2)   attention(2)   mlp(1)   attention(1)
    [A] backward of a half begins: it is whole, those behind it are what they keep
           whole  +  resident       +  resident  +  resident
    [B] in its last window the next one is regenerated, when of itself only its inputs are still needed
           tail   +  whole          +  resident  +  resident

There is one formula of a peak, a table: a row for every moment of the backward, a column for every half, and in it what the half
holds then. A half goes through the same eight columns wherever it is, only later than those before it:

    COLUMNS       held     -4     -3     -2     -1     [A]     [B]     over
    bytes         held         held + what is there ahead      whole   tail    0

    moments       before   mlp(2) [A] [B]   attention(2) [A] [B]    mlp(1) [A] [B]  ...
    of mlp(2)      held        [A]  [B]       over                   over
    of attention(2) held       -2   -1        [A] [B]                over
    of mlp(1)      held        -4   -3        -2  -1                 [A] [B]

What is regenerated in other windows, or gathered behind them, is there at [A], too. A replay may run in windows of the two halves
before: what of it is there at their four moments is `ahead`. The other micro-batches in flight hold their resident parts all the
while. What is regenerated early, while a forward or a receive still waits, is there from before the first backward until its own,
once: only one micro-batch's backward comes next.

Beside the layers is counted what the half that needs most has in hand; where another one runs backward, so much less of it.

A half's resident part is its input, what its kept items save, and the outputs of kept sites that a replay passes. Of that, blocks
large enough can go to the host (`smallest_offloaded_bytes`).

A layer that is checkpointed keeps one input. Its MLP half gets its own from the attention half, which runs again when the MLP
half's backward begins, so that all of the layer is there at once:

    layer 1              mlp(1) [A] [B]                      attention(1) [A] [B]
    of mlp(1)     0      input and all that it saves         over
    of attention(1) input  the same, `ahead`                 whole
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lynx.anatomy import Section
from megatron_lynx.cost.replay import Checkpoint, Replay
from megatron_lynx.profiler.profile import HalfProfile, SavedTensor
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
    ahead: tuple[int, int, int, int] = (0, 0, 0, 0)
    """What is there, of what is regenerated or gathered, at the four moments before its own backward, the nearest one first:
    when the half before ends, when it begins, when that before it ends, when it begins."""
    early: int = 0
    """What is there before the stage's first backward begins, and then until its own. It is in none of the other parts."""
    movable: int = 0
    """The part of the resident bytes that can go to the host."""
    less_in_hand: int = 0
    """How much less is in hand while it runs backward than what is counted beside the layers (`cost.in_hand`)."""

    @property
    def whole(self) -> int:
        return self.resident + self.regenerated

    @property
    def held(self) -> int:
        """What is held while backward is on its way to the half."""
        return self.resident + self.early

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """What it holds from column to column, less what its own backward has not in hand."""
        held, less = self.held, self.less_in_hand
        return held, *(held + size for size in reversed(self.ahead)), self.whole - less, self.tail - less, 0


COLUMNS = ("held", "-4", "-3", "-2", "-1", "begins", "ends", "over")
"""When a half holds what: by the moments before its own backward [A], which has two itself [A] [B]."""

BEGINS = COLUMNS.index("begins")


def half_memory(
    section: Section,
    profile: HalfProfile,
    replay: Replay,
    *,
    gathered_bytes: int = 0,
    exchanging: bool = False,
    checkpoint: Checkpoint | None = None,
    less_in_hand_bytes: int = 0,
) -> HalfMemory:
    """A half that is replayed on demand. `gathered_bytes`: the buffer of an input that is gathered once. `exchanging`: whether
    its windows are exchanges of tokens. `checkpoint`: of one that keeps its input at most; where the half behind it needs what it
    returns, it runs again when that one does. `less_in_hand_bytes`: as `HalfMemory` has it."""
    resident, regenerated = profile.input_bytes + replay.stays_bytes, replay.regenerated_bytes + gathered_bytes
    feeds, fed, *_ = checkpoint or Checkpoint()
    if fed:
        resident, regenerated = resident - profile.input_bytes, regenerated + profile.input_bytes
    windows = section.has_windows or exchanging
    movable = movable_bytes(section, profile, replay, smallest_offloaded_bytes(profile.input_bytes), fed=fed)
    return HalfMemory(
        resident=resident,
        regenerated=regenerated,
        tail=_argument_bytes(section, profile) + gathered_bytes if windows else resident + regenerated,
        ahead=(regenerated, regenerated, 0, 0) if feeds else (0, 0, 0, 0),
        movable=movable,
        less_in_hand=less_in_hand_bytes,
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


def _wrapped(section: Section, tensor: SavedTensor) -> bool:
    """Whether it is what a linear of experts keeps of its input in FP8: each expert's is wrapped, and stays on the device."""
    return tensor.saved_by == (tensor.made_by,) and section.of_name[tensor.made_by].of_experts


def movable_bytes(section: Section, profile: HalfProfile, replay: Replay, smallest_bytes: int, *, fed: bool = False) -> int:
    """How much of a half can go to the host: its input, unless it is `fed` and keeps none, and what stays, but for small blocks
    and arguments that layers share. Of one that is a node what the node itself saves."""
    stays = [tensor for tensor in replay.stays if tensor.made_by != "input" and not _wrapped(section, tensor)]
    if section.apart:
        stays = [tensor for tensor in stays if {tensor.made_by, *tensor.saved_by[:1]}.isdisjoint(section.apart)]
    blocks = [*([] if fed or section.apart else [profile.input_bytes]), *(tensor.bytes for tensor in stays)]
    return sum(size for size in blocks if size >= smallest_bytes)


def resident_bytes(halves: Iterable[HalfMemory]) -> int:
    return sum(half.resident for half in halves)


def held_at_moments(columns: NDArray[Any]) -> NDArray[Any]:
    """What halves hold together at every moment of one micro-batch's backward.

    columns: (..., halves in the order of a backward, COLUMNS). Returns (..., 1 + 2 halves): before backward begins, then when
    that of each half begins [A] and ends [B].
    """
    halves, held = columns.shape[-2], columns[..., 0]
    behind = np.flip(np.flip(held, -1).cumsum(-1), -1)  # of a half and of all that come later
    moments = np.concatenate([behind[..., :1], np.repeat(behind, 2, axis=-1)], axis=-1)
    beyond = columns - held[..., None]
    for later in range(min(3, halves)):  # at the moments of a half: of itself, of the next one, of that behind it
        both = slice(BEGINS - 2 * later, BEGINS - 2 * later + 2)
        moments[..., 1 : 1 + 2 * (halves - later)] += beyond[..., later:, both].reshape(*columns.shape[:-2], -1)
    return moments


def held_by_one(columns: NDArray[Any], half: int, halves: int) -> NDArray[Any]:
    """What one of so many halves adds to that: (options, COLUMNS) of it to (options, moments)."""
    every = np.zeros((len(columns), halves, len(COLUMNS)), columns.dtype)
    every[:, half] = columns
    return held_at_moments(every)


def peak_bytes(backward_order: Sequence[HalfMemory], in_flight: float, loss_bytes: int = 0) -> int:
    """The most that the stage's layers hold at once, over all micro-batches in flight.

    `in_flight` need not be whole: what is offloaded counts for less than one micro-batch (Yuan et al.). `loss_bytes`: what the
    loss holds before backward reaches the layers, beyond what is held beside them then.
    """
    if not backward_order:
        return loss_bytes
    moments = held_at_moments(np.array([half.columns for half in backward_order]))
    peak = max(int(moments[0]) + loss_bytes, int(moments[1:].max()))
    return peak + math.ceil((in_flight - 1) * resident_bytes(backward_order))
