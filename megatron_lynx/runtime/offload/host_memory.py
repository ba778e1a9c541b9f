"""Host memory for offloaded activations: how much of it one rank may hold, and blocks of exact sizes, lent again and again.

    a rank's limit        the least, over all that it takes from, of  (free - reserve) / ranks that take from it; all ranks have
                          heard from each other what they take from (`free_memory`), and how large their training state is
    reserve               a tenth of what is free, for page cache and data loaders, or what the ranks' states take, if that is
                          more: an asynchronous checkpoint copies them to the host, and an optimizer on the CPU has them there

    before step 1         bytes known, sizes not ──> a slab is locked ahead for each micro-batch   ┌───────────┐┌───────────┐
    first micro-batch     sizes known ──> room for `sets` micro-batches is set aside, in these     ┌────┬──┬───┐┌────┬──┬───┐
    every micro-batch     lend: for each size the smallest free block that holds it;               └────┴──┴───┘└────┴──┴───┘
                          where none is, and room is left, one more slab: one micro-batch's
    a block's end         it is free again, but for the copy that still reads it: the next copy into it comes behind that one
    other sizes           a new slab; the old one goes, and counts, with the last of its blocks, and the log says so once: from
                          then on, and of experts from the first, blocks only grow

Page-locking takes the host seconds for tens of GB, and longer where all ranks of a host do it at once: so before the first step,
as far as a plan says how much it will be (`Slab.cut`). What is not known then is locked for one micro-batch at a time.

PyTorch's own page-locked allocator rounds up to powers of two; a slab is as large as what was asked for, up to pages. Slabs do
not come from PyTorch's allocators, so no counter takes them for activations.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.free_memory import FreeMemory, Pot
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.offload.copier import Copy
from megatron_lynx.units import format_bytes

log = logging.getLogger(__name__)

RESERVE = 10
"""One of so many parts of what is free is left alone."""

ALIGNMENT = 256
"""Bytes; where blocks begin."""

MANY = 256
"""Blocks are taken to have so many units at least, where a plan lets smaller ones go: what lies ahead is a guess then."""


@dataclass(frozen=True)
class HostFacts:
    """What one rank says of its host."""

    free: FreeMemory
    state_bytes: int = 0
    """Weights, master weights and moments that this rank owns."""


@dataclass
class HostLimit:
    """What one rank may hold of its host's memory, all its pools together."""

    most_bytes: int
    held_bytes: int = 0
    words: str = ""
    """Where the limit comes from, for messages."""

    def gives_back(self, size_bytes: int) -> None:
        """So much is not held any more."""
        self.held_bytes -= size_bytes


def limit_of(mine: HostFacts, ranks: Sequence[HostFacts]) -> HostLimit:
    """`ranks`: what each rank of the run says, this one among them."""
    return min((_share(pot, ranks) for pot in mine.free.pots), key=lambda share: share.most_bytes)


def _share(pot: Pot, ranks: Sequence[HostFacts]) -> HostLimit:
    same = [(facts, other) for facts in ranks for other in facts.free.pots if other.identity == pot.identity]
    free_bytes = min(other.free_bytes for _, other in same)  # each has looked at another moment
    reserve_bytes = min(free_bytes, max(free_bytes // RESERVE, sum(facts.state_bytes for facts, _ in same)))
    words = f"{format_bytes(free_bytes)} free of {pot.words}, {format_bytes(reserve_bytes)} of it in reserve"
    words += f", for {len(same)} rank{'s' if len(same) > 1 else ''}"
    return HostLimit((free_bytes - reserve_bytes) // len(same), words=words)


def too_little(where: str, needed_bytes: int, limit: HostLimit) -> OffloadError:
    """The host has too little memory for what a plan offloads."""
    found_bytes, source = limit.most_bytes, f" ({limit.words})" if limit.words else ""
    problem = Problem(
        f"{where}: host memory for offloaded activations",
        f"{found_bytes} bytes ({format_bytes(found_bytes)}) available to this rank{source}",
        f"{needed_bytes} bytes ({format_bytes(needed_bytes)})",
        "lower offload.bytes in the plan, or start fewer ranks on a host",
    )
    return OffloadError("the host has too little memory", [problem])


class Slab:
    """One stretch of host memory, page-locked for the device. It goes, and counts no more, when nobody holds it or its blocks.

    Raises `OffloadError` where the host has none. `where`: whose it is, for that.
    """

    def __init__(self, where: str, size_bytes: int, device: Device, limit: HostLimit) -> None:
        try:
            self.tensor = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
            device.lock(self.tensor)
        except (OSError, MemoryError, RuntimeError) as error:
            raise too_little(where, limit.held_bytes + size_bytes, limit) from error
        # Only what was locked may be unlocked: CUDA would remember the error, and a later kernel would get it.
        weakref.finalize(self, device.unlock, self.tensor).atexit = False
        limit.held_bytes += size_bytes
        weakref.finalize(self, limit.gives_back, size_bytes).atexit = False
        self._used_bytes = 0

    @property
    def left_bytes(self) -> int:
        return self.tensor.nbytes - self._used_bytes

    def cut(self, size_bytes: int) -> Tensor | None:
        """The next so many bytes; None where not as many are left."""
        if size_bytes > self.left_bytes:
            return None
        start, self._used_bytes = self._used_bytes, self._used_bytes + size_bytes
        return self.tensor[start : self._used_bytes]


class _Shelved(NamedTuple):
    tensor: Tensor
    slab: Slab
    reader: Copy | None
    shaped: Tensor
    """The same memory with the type and shape of the tensor that had it last."""


class Block:
    """Host memory that one storage's bytes have until the block is dropped."""

    def __init__(self, shelved: _Shelved, shelf: deque[_Shelved]) -> None:
        self.tensor = shelved.tensor
        self.last: Copy | None = shelved.reader
        """The last copy that uses it; the next one is ordered after it."""
        self._slab = shelved.slab
        self._shaped = shelved.shaped
        self._shelf = shelf

    def like(self, tensor: Tensor) -> Tensor:
        """The beginning of the block, as a tensor with the type and shape of this contiguous one."""
        if self._shaped.dtype is not tensor.dtype or self._shaped.shape != tensor.shape:
            self._shaped = self.tensor[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return self._shaped

    def __del__(self) -> None:
        self._shelf.append(_Shelved(self.tensor, self._slab, self.last, self._shaped))


class HostPool:
    """The blocks of one chunk. `sets`: how many micro-batches are on the host at once, at most, as far as is known before.

    `ragged`: their sizes differ from one micro-batch to the next, as what experts keep does. Then blocks are a little larger than
    asked for, and never become smaller, so that soon no micro-batch asks for others. `ahead`: slabs that were locked before sizes
    were known, for this pool and others; each takes what it needs of them.
    """

    def __init__(
        self, where: str, device: Device, limit: HostLimit, sets: int, *, ragged: bool = False, ahead: list[Slab] | None = None
    ) -> None:
        self.where = where
        self.bytes = 0
        """Set aside: of all blocks in use, and of those still to be made. Not of those that were replaced and are still lent."""
        self._ahead = [] if ahead is None else ahead
        self._device = device
        self._limit = limit
        self._sets = max(1, sets)
        self._ragged = ragged
        self._made = 0
        """Sets whose blocks are there."""
        self._promised_bytes = 0
        """Bytes of the slabs that are still to be made."""
        self._pieces: list[tuple[Slab, Tensor]] = []
        """Parts of slabs that were locked ahead, each of which has room for one micro-batch's blocks."""
        self._sizes: list[int] = []
        self._shelves: defaultdict[int, deque[_Shelved]] = defaultdict(deque)
        """Free blocks, by size. A block goes back to where it was taken from."""

    def lend(self, sizes: Sequence[int]) -> list[Block]:
        """A block of at least each size. Raises `OffloadError` where the host has no room for as many."""
        chosen = self._fitting(sizes)
        if chosen is None:
            if self._made == self._sets or not self._known(sizes):
                self._make_room(sizes)
            self._make_blocks()
            chosen = self._fitting(sizes)
        assert chosen is not None, f"{self.where}: no room for {sizes} after it was made"
        return [Block(shelved, self._shelves[shelved.tensor.nbytes]) for shelved in chosen]

    def clear(self) -> None:
        """Give everything back that is not lent. A slab of which a block is lent counts until that one comes back."""
        self._limit.held_bytes -= self._promised_bytes
        self._shelves, self._sizes, self.bytes, self._made = defaultdict(deque), [], 0, 0
        self._promised_bytes, self._pieces = 0, []

    def _fitting(self, sizes: Sequence[int]) -> list[_Shelved] | None:
        """Those of just these sizes, as for every micro-batch like the one before; else best fit, largest first. None, with
        nothing taken, where one size finds no block."""
        shelves = self._shelves
        if all(len(shelves.get(size, ())) >= count for size, count in Counter(sizes).items()):
            return [shelves[size].popleft() for size in sizes]
        free = [shelf.popleft() for shelf in list(shelves.values()) for _ in range(len(shelf))]
        free.sort(key=_size)
        left, chosen = list(free), {}
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            at = bisect_left(left, sizes[index], key=_size)
            if at == len(left):
                self._put_back(free)
                return None
            chosen[index] = left.pop(at)
        self._put_back(left)
        return [chosen[index] for index in range(len(sizes))]

    def _put_back(self, shelved: Sequence[_Shelved]) -> None:
        for each in shelved:
            self._shelves[_size(each)].append(each)

    def _known(self, sizes: Sequence[int]) -> bool:
        """Whether a micro-batch with these fits into a slab."""
        ordered = sorted(sizes, reverse=True)
        return len(ordered) <= len(self._sizes) and all(a <= b for a, b in zip(ordered, self._sizes, strict=False))

    def _make_room(self, sizes: Sequence[int]) -> None:
        """Set memory aside. Raises `OffloadError` where the host has too little."""
        before = self.bytes
        if self._known(sizes):
            self._set_aside(1)
            self._sets += 1
            log.warning("%s: one more micro-batch on the host than before; %s", self.where, self._change(before))
            return
        known = self._sizes
        self.clear()
        self._sizes = self._roomier(known, sizes) if self._ragged else sorted(sizes, reverse=True)
        self._set_aside(self._sets)
        if before and not self._ragged:
            log.warning("%s: activations have other sizes than before; %s", self.where, self._change(before))
            self._ragged = True  # sequences of changing length: sizes that come and go must not be made room for again and again
        else:
            log.info("%s: %s", self.where, self._change(before))

    def _roomier(self, known: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """By place in the order of sizes the most that was asked for, and an eighth more; as asked where that is too much."""
        ordered = sorted(sizes, reverse=True)
        most = [max(one, other) for one, other in zip_longest(known, (size + size // 8 for size in ordered), fillvalue=0)]
        free_bytes = self._limit.most_bytes - self._limit.held_bytes + sum(slab.left_bytes for slab in self._ahead)
        return most if self._sets * sum(map(_aligned, most)) <= free_bytes else ordered

    def _change(self, before: int) -> str:
        return f"host memory for offloaded activations: {format_bytes(before)} before, {format_bytes(self.bytes)} now"

    @property
    def _rooms(self) -> list[int]:
        """Bytes of one micro-batch's blocks in a slab."""
        return [_aligned(size) for size in self._sizes]

    def _set_aside(self, sets: int) -> None:
        """Count what so many micro-batches need beyond what was locked ahead. Raises `OffloadError` where that is too much."""
        room_bytes = sum(self._rooms)
        pieces = [piece for _ in range(sets) if (piece := self._cut_ahead(room_bytes)) is not None]
        promised_bytes = (sets - len(pieces)) * room_bytes
        if self._limit.held_bytes + promised_bytes > self._limit.most_bytes:
            raise too_little(self.where, self._limit.held_bytes + promised_bytes, self._limit)
        self.bytes += sets * room_bytes
        self._limit.held_bytes += promised_bytes
        self._promised_bytes += promised_bytes
        self._pieces += pieces

    def _cut_ahead(self, size_bytes: int) -> tuple[Slab, Tensor] | None:
        """So many bytes of a slab that was locked ahead. One that has no room for them is left to whom it has served."""
        while self._ahead:
            if (piece := self._ahead[0].cut(size_bytes)) is not None:
                return self._ahead[0], piece
            self._ahead.pop(0)
        return None

    def _make_blocks(self) -> None:
        """Cut blocks for one micro-batch out of what was set aside."""
        slab, piece = self._pieces.pop(0) if self._pieces else self._new_slab()
        self._made += 1
        start = 0
        for size, room in zip(self._sizes, self._rooms, strict=True):
            room_for_it = piece[start : start + size]
            self._put_back([_Shelved(room_for_it, slab, None, room_for_it)])
            start += room

    def _new_slab(self) -> tuple[Slab, Tensor]:
        room_bytes = sum(self._rooms)
        self._limit.held_bytes -= room_bytes  # promised until now; a slab counts itself
        self._promised_bytes -= room_bytes
        slab = Slab(self.where, room_bytes, self._device, self._limit)
        return slab, slab.tensor


def _size(shelved: _Shelved) -> int:
    return shelved.tensor.nbytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def bytes_ahead(policy_bytes: int, smallest_tensor_bytes: int) -> int:
    """What the blocks for so many bytes need at most, in tensors of at least that size: each may leave a part of its last one."""
    tensors = policy_bytes // max(smallest_tensor_bytes, MANY * ALIGNMENT) + 2
    return _aligned(policy_bytes) + tensors * ALIGNMENT
