"""Host memory for offloaded activations: a rank's limit, and reused page-locked blocks.

    a rank's limit     the least, over the pots of memory that it uses, of  (free - reserve) / ranks that use the pot
                       (`free_memory`)
    reserve            a tenth of the free memory, for page cache and data loaders, or the ranks' training states if larger: an
                       asynchronous checkpoint copies them to the host, and a CPU optimizer keeps them there

    before step 1      bytes are known, sizes are not: a slab of the plan's bytes is page-locked ┌──────────────────────────┐
    lend               the smallest free block of the same shelf that fits; otherwise a set      ├────┬──┬───┬────┬──┬───┐  │
                       of blocks for all requested sizes is cut from the slab                    └────┴──┴───┴────┴──┴───┴──┘
    slab used up       another slab, as large as the set
    block dropped      it is free; the next copy into it waits for the one that still reads it
    larger sizes       the shelf is replaced; its slab is freed with the last of its blocks. From then on, and for experts from
    the
                       first change, blocks are an eighth larger than requested, to fit later sizes

A shelf belongs to one half of a chunk, whose sizes repeat. Page-locking takes the host seconds for tens of GB. PyTorch's
page-locked allocator rounds up to powers of two; a slab has the requested size, up to pages, and is not counted as activations.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
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
"""Divisor: this part of the free memory is left alone."""

ALIGNMENT = 256
"""Bytes; blocks begin at multiples."""

MANY = 256
"""Least average size of offloaded tensors that is assumed, in units of `ALIGNMENT`."""


@dataclass(frozen=True)
class HostFacts:
    """What one rank reports of its host."""

    free: FreeMemory
    state_bytes: int = 0
    """Weights, master weights and moments that this rank owns."""


@dataclass
class HostLimit:
    """Host memory that one rank may use."""

    most_bytes: int
    held_bytes: int = 0
    words: str = ""
    """Source of the limit, for messages."""

    @property
    def free_bytes(self) -> int:
        return self.most_bytes - self.held_bytes

    def gives_back(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


def limit_of(mine: HostFacts, ranks: Sequence[HostFacts]) -> HostLimit:
    """Return the limit of the rank with the facts `mine`, one of `ranks`."""
    return min((_share(pot, ranks) for pot in mine.free.pots), key=lambda share: share.most_bytes)


def _share(pot: Pot, ranks: Sequence[HostFacts]) -> HostLimit:
    same = [(facts, other) for facts in ranks for other in facts.free.pots if other.identity == pot.identity]
    free_bytes = min(other.free_bytes for _, other in same)  # each rank read it at another moment
    reserve_bytes = min(free_bytes, max(free_bytes // RESERVE, sum(facts.state_bytes for facts, _ in same)))
    words = f"{format_bytes(free_bytes)} free of {pot.words}, {format_bytes(reserve_bytes)} of it in reserve"
    words += f", for {len(same)} rank{'s' if len(same) > 1 else ''}"
    return HostLimit((free_bytes - reserve_bytes) // len(same), words=words)


def too_little(where: str, needed_bytes: int, limit: HostLimit) -> OffloadError:
    found_bytes, source = limit.most_bytes, f" ({limit.words})" if limit.words else ""
    problem = Problem(
        f"{where}: host memory for offloaded activations",
        f"{found_bytes} bytes ({format_bytes(found_bytes)}) available to this rank{source}",
        f"{needed_bytes} bytes ({format_bytes(needed_bytes)})",
        "lower offload.bytes in the plan, or start fewer ranks on a host",
    )
    return OffloadError("the host has too little memory", [problem])


class Slab:
    """Page-locked host memory, freed with the last reference to it or its blocks. Raises `OffloadError`."""

    def __init__(self, where: str, size_bytes: int, device: Device, limit: HostLimit) -> None:
        if size_bytes > limit.free_bytes:
            raise too_little(where, limit.held_bytes + size_bytes, limit)
        try:
            self.tensor = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
            device.lock(self.tensor)
        except (OSError, MemoryError, RuntimeError) as error:
            raise too_little(where, limit.held_bytes + size_bytes, limit) from error
        # Unlock only locked memory: CUDA would remember the error, and a later kernel would report it.
        weakref.finalize(self, device.unlock, self.tensor).atexit = False
        limit.held_bytes += size_bytes
        weakref.finalize(self, limit.gives_back, size_bytes).atexit = False
        self.left_bytes = size_bytes

    def cut(self, size_bytes: int) -> Tensor:
        """Return the next `size_bytes`; the block after it begins at a multiple of `ALIGNMENT`."""
        start = self.tensor.nbytes - self.left_bytes
        self.left_bytes -= _aligned(size_bytes)
        return self.tensor[start : start + size_bytes]


class _Shelved(NamedTuple):
    tensor: Tensor
    slab: Slab
    reader: Copy | None
    shaped: Tensor
    """The same memory with dtype and shape of its last tensor."""


class Block:
    """Host memory of one storage. It returns to its shelf when it is dropped."""

    def __init__(self, shelved: _Shelved, free: deque[_Shelved]) -> None:
        self.tensor = shelved.tensor
        self.last: Copy | None = shelved.reader
        """The last copy that uses it; the next one is ordered after it."""
        self._slab = shelved.slab
        self._shaped = shelved.shaped
        self._free = free

    def like(self, tensor: Tensor) -> Tensor:
        """Return the start of the block with dtype and shape of this contiguous tensor."""
        if self._shaped.dtype is not tensor.dtype or self._shaped.shape != tensor.shape:
            self._shaped = self.tensor[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return self._shaped

    def __del__(self) -> None:
        self._free.append(_Shelved(self.tensor, self._slab, self.last, self._shaped))


class _Shelf:
    """Blocks for sets of the same `sizes`, largest first."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes
        self.set_bytes = sum(map(_aligned, sizes))
        self.bytes = 0
        """Bytes of all its blocks."""
        self._free: dict[int, deque[_Shelved]] = {size: deque() for size in reversed(sizes)}
        """By size, smallest first. A block returns to its deque at any time."""

    def fits(self, sizes: Sequence[int]) -> bool:
        """Return whether a set has a block for each size."""
        ordered = sorted(sizes, reverse=True)
        return len(ordered) <= len(self.sizes) and all(a <= b for a, b in zip(ordered, self.sizes, strict=False))

    def add_set(self, slab: Slab) -> None:
        self.bytes += self.set_bytes
        for size in self.sizes:
            piece = slab.cut(size)
            self._free[size].append(_Shelved(piece, slab, None, piece))

    def take(self, sizes: Sequence[int]) -> list[Block] | None:
        """Return the smallest block that fits each size; takes none and returns None if a size finds none."""
        blocks = list[Block]()
        for size in sizes:
            free = self._free.get(size) or next((of for larger, of in self._free.items() if larger >= size and of), None)
            if free is None:
                return None  # blocks found before return to the shelf
            blocks.append(Block(free.popleft(), free))
        return blocks


class HostMemory:
    def __init__(self, where: str, device: Device, limit: HostLimit) -> None:
        self._where, self._device, self._limit = where, device, limit
        self._locked: Slab | None = None
        """Locked before sizes were known, while it has space left."""
        self._planned_bytes: int | None = None
        """Is None once the blocks have exceeded them."""
        self._sizes_change = False
        """Whether that was logged."""
        self._shelves: dict[Hashable, _Shelf] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all blocks, without those of replaced shelves."""
        return sum(shelf.bytes for shelf in self._shelves.values())

    def lock(self, size_bytes: int) -> None:
        """Page-lock memory from which blocks are cut later. Raises `OffloadError` if the host has too little."""
        self._locked, self._planned_bytes = Slab(self._where, size_bytes, self._device, self._limit), size_bytes

    def lend(self, key: Hashable, sizes: Sequence[int], *, changing: bool = False) -> list[Block]:
        """Return a block of at least each size from the shelf `key`. `changing`: sizes differ. Raises `OffloadError`."""
        if key not in self._shelves or (blocks := self._shelves[key].take(sizes)) is None:
            self._grow(key, sizes, changing)
            blocks = self._shelves[key].take(sizes)
            assert blocks is not None, f"{self._where}: no blocks for {sizes} after they were made"
        return blocks

    def clear(self) -> None:
        """Free all memory that is not lent. A slab with lent blocks counts until they return."""
        self._shelves, self._locked = {}, None

    def _grow(self, key: Hashable, sizes: Sequence[int], changing: bool) -> None:
        before = self.bytes
        if key not in self._shelves:
            self._shelves[key] = _Shelf(sorted(sizes, reverse=True))
        elif not self._shelves[key].fits(sizes):
            old = self._shelves.pop(key)
            known, sets = old.sizes, old.bytes // old.set_bytes
            del old  # its memory may be needed for the next one
            self._shelves[key] = _Shelf(self._roomier(known, sorted(sizes, reverse=True), sets))
            if not changing and not self._sizes_change:
                log.warning("%s: activations have other sizes than before", self._where)
                self._sizes_change, self._planned_bytes = True, None
        shelf = self._shelves[key]
        shelf.add_set(self._room(shelf.set_bytes))
        said = "host memory for offloaded activations", format_bytes(before), format_bytes(self.bytes)
        if self._planned_bytes is not None and self.bytes > self._planned_bytes:
            log.warning("%s: more micro-batches on the host than planned; %s: %s before, %s now", self._where, *said)
            self._planned_bytes = None
        else:
            log.info("%s: %s: %s before, %s now", self._where, *said)

    def _roomier(self, known: Sequence[int], sizes: Sequence[int], sets: int) -> list[int]:
        """Return by rank the largest size plus an eighth; the requested sizes if that exceeds the limit for `sets` sets."""
        enlarged_sizes = [max(one, other) for one, other in zip_longest(known, (size + size // 8 for size in sizes), fillvalue=0)]
        locked_bytes = self._locked.left_bytes if self._locked is not None else 0
        return (
            enlarged_sizes if sets * sum(map(_aligned, enlarged_sizes)) <= self._limit.free_bytes + locked_bytes else list(sizes)
        )

    def _room(self, set_bytes: int) -> Slab:
        if self._locked is not None and self._locked.left_bytes >= set_bytes:
            return self._locked
        self._locked = None  # it is freed with its blocks
        return Slab(self._where, set_bytes, self._device, self._limit)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def bytes_ahead(policy_bytes: int, smallest_tensor_bytes: int) -> int:
    """Return the most bytes of blocks for this policy: each tensor may waste a part of its last unit."""
    tensors = policy_bytes // max(smallest_tensor_bytes, MANY * ALIGNMENT) + 2
    return _aligned(policy_bytes) + tensors * ALIGNMENT
