"""Peak memory of one stage's layers.

Peaks come from one table: a row per moment of the backward, a column per half, its live bytes in the cells. Every half has the
same eight columns, shifted by its position:

    COLUMNS       held     -4     -3     -2     -1     [A]     [B]     over
    bytes         held         held + recomputed ahead         whole   tail    0

    moments       before   mlp(2) [A] [B]   attention(2) [A] [B]    mlp(1) [A] [B]  ...
    of mlp(2)      held        [A]  [B]       over                   over
    of attention(2) held       -2   -1        [A] [B]                over
    of mlp(1)      held        -4   -3        -2  -1                 [A] [B]

    [A] backward of a half begins      [B] its last window: of itself only its inputs are still needed

Recomputation may use windows of the two preceding halves (`ahead`: bytes live at their four moments); from other windows it is
live at [A]. The other micro-batches in flight hold their resident parts throughout.

Resident are a half's input, the tensors saved by kept items, and the outputs of kept sites that recomputation passes.

A checkpointed layer keeps one input. Its MLP half gets its input from the attention half, which is recomputed when the MLP half's
backward begins, so that the whole layer is live at once.
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
from megatron_lynx.cost.recompute import Checkpoint, Recomputation
from megatron_lynx.profiler.profile import HalfProfile, Profile
from megatron_lynx.units import MIB


@dataclass(frozen=True)
class HalfMemory:
    resident: int
    regenerated: int
    """Added by recomputation, a gathered input included: the size of its frame."""
    tail: int
    """Needed by its backward at its last collective: its input and its column-parallel linear's. Everything if it has no
    collectives."""
    ahead: tuple[int, ...] = (0, 0, 0, 0)
    """Recomputed or gathered bytes already live at the four moments before its backward, nearest first."""
    movable: int = 0
    """Part of `resident` that can be offloaded."""
    less_in_hand: int = 0
    """How much smaller its transients are than those counted besides the layers (`cost.moments`)."""

    @property
    def whole(self) -> int:
        return self.resident + self.regenerated

    @cached_property
    def columns(self) -> tuple[int, ...]:
        held, less = self.resident, self.less_in_hand
        return held, *(held + size for size in reversed(self.ahead)), self.whole - less, self.tail - less, 0


COLUMNS = ("held", "-4", "-3", "-2", "-1", "begins", "ends", "over")

BEGINS = COLUMNS.index("begins")


def half_memory(
    section: Section,
    profile: Profile,
    recompute: Recomputation,
    checkpoint: Checkpoint | None,
    less_in_hand_bytes: int,
    gathered_bytes: int = 0,
    kept_gathers_bytes: int = 0,
) -> HalfMemory:
    """Return the memory of a half that is recomputed on demand. `gathered_bytes`: buffer of an input gathered once.
    `kept_gathers_bytes`: gathered inputs kept for recomputation."""
    half = profile.of(section)
    resident, regenerated = (
        half.input_bytes + recompute.stays_bytes + kept_gathers_bytes,
        recompute.regenerated_bytes + gathered_bytes,
    )
    feeds, fed, *_ = checkpoint or Checkpoint()
    if fed:
        resident, regenerated = resident - half.input_bytes, regenerated + half.input_bytes
    windows = section.has_windows or (section.exchanges_in_windows and profile.shape.expert > 1)
    return HalfMemory(
        resident=resident,
        regenerated=regenerated,
        tail=_argument_bytes(section, half) + gathered_bytes if windows else resident + regenerated,
        ahead=(regenerated, regenerated, 0, 0) if feeds else (0, 0, 0, 0),
        movable=movable_bytes(section, half, recompute, smallest_offloaded_bytes(half.input_bytes), fed=fed),
        less_in_hand=less_in_hand_bytes,
    )


def _argument_bytes(section: Section, profile: HalfProfile) -> int:
    """Return a half's input and what its backward reads after its last collective: the input of its column-parallel linear; for
    experts all before the dispatch, for latent attention all before its heads."""
    read = {section.column_parallel}
    if section.two_paths:
        read = {*section.names[: section.index(section.inner[0])]}
    elif not section.has_windows:
        read = {*section.names[: section.index(section.item("dispatch").name)]}
    return profile.input_bytes + sum(tensor.bytes for tensor in profile.tensors if not read.isdisjoint(tensor.saved_by))


def smallest_offloaded_bytes(input_bytes: int) -> int:
    """Return the smallest block that a plan offloads: 1 MiB (Yuan et al.), or a quarter of `input_bytes`, one layer's input."""
    return min(MIB, input_bytes // 4)


def movable_bytes(
    section: Section, profile: HalfProfile, recompute: Recomputation, smallest_bytes: int, *, fed: bool = False
) -> int:
    """Return the bytes of a half that can be offloaded: its input, unless `fed`, and resident tensors, except small blocks and
    shared arguments; if the half is split into nodes, only its own node's."""
    stays = [tensor for tensor in recompute.stays if tensor.made_by != "input"]
    if section.apart:
        stays = [tensor for tensor in stays if {tensor.made_by, *tensor.saved_by[:1]}.isdisjoint(section.apart)]
    input_bytes = 0 if fed or section.apart or profile.input_bytes < smallest_bytes else profile.input_bytes
    return input_bytes + sum(tensor.bytes for tensor in stays if tensor.bytes >= tensor.blocks * smallest_bytes)


def resident_bytes(halves: Iterable[HalfMemory]) -> int:
    return sum(half.resident for half in halves)


def held_at_moments(columns: NDArray[Any]) -> NDArray[Any]:
    """columns: (..., halves in backward order, COLUMNS). Returns (..., 1 + 2 halves): before backward, then [A] and [B] of each
    half."""
    halves, held = columns.shape[-2], columns[..., 0]
    behind = np.flip(np.flip(held, -1).cumsum(-1), -1)  # of a half and of all later ones
    moments = np.concatenate([behind[..., :1], np.repeat(behind, 2, axis=-1)], axis=-1)
    beyond = columns - held[..., None]
    for later in range(min(3, halves)):  # at a half's moments: of itself, the next, and the one after that
        moment_columns = slice(BEGINS - 2 * later, BEGINS - 2 * later + 2)
        moments[..., 1 : 1 + 2 * (halves - later)] += beyond[..., later:, moment_columns].reshape(*columns.shape[:-2], -1)
    return moments


def peak_bytes(backward_order: Sequence[HalfMemory], in_flight: float, loss_bytes: int = 0) -> int:
    """Return the peak of the stage's layers over all micro-batches in flight. `in_flight` may be fractional: offloaded parts
    count less (Yuan et al.). `loss_bytes`: extra bytes of the loss."""
    if not backward_order:
        return loss_bytes
    moments = held_at_moments(np.array([half.columns for half in backward_order]))
    peak = max(int(moments[0]) + loss_bytes, int(moments[1:].max()))
    return peak + math.ceil((in_flight - 1) * resident_bytes(backward_order))
