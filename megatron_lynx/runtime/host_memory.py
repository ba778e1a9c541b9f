"""Host memory for offloaded activations: a rank's limit, and reused page-locked rooms.

A rank may use the least, over the pots of memory that it uses, of (free - reserve) / ranks that use the pot (`free_memory`). The
reserve is a tenth of the free memory, for page cache and data loaders, or the ranks' training states if larger.

Before the first step a slab of the plan's bytes is page-locked. Rooms are cut from it, or from further slabs: one for a half's
storages, on a shelf of its half, whose sizes repeat.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.free_memory import FreeMemory, Pot
from megatron_lynx.runtime.device import Copy, Device
from megatron_lynx.units import format_bytes

log = logging.getLogger(__name__)

RESERVE = 10
"""Divisor: this part of the free memory is left alone."""

ALIGNMENT = 256

MANY = 256
"""Least average size of offloaded tensors that is assumed, in units of `ALIGNMENT`."""


@dataclass(frozen=True)
class HostFacts:
    free: FreeMemory
    state_bytes: int = 0
    """Weights, master weights and moments that this rank owns."""


@dataclass
class HostLimit:
    most_bytes: int
    held_bytes: int = 0
    words: str = ""

    @property
    def free_bytes(self) -> int:
        return self.most_bytes - self.held_bytes

    def gives_back(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


def limit_of(mine: HostFacts, ranks: Sequence[HostFacts]) -> HostLimit:
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
    """Page-locked host memory, freed with the last reference to it or its rooms. Raises `OffloadError`."""

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
        """Return the next `size_bytes`, a multiple of `ALIGNMENT`."""
        start = self.tensor.nbytes - self.left_bytes
        self.left_bytes -= size_bytes
        return self.tensor[start : start + size_bytes]


@dataclass(eq=False)
class Room:
    """Memory for the storages of one half of one micro-batch."""

    memory: Tensor
    slab: Slab
    last: Copy | None = None
    """The last copy that uses it; the next one is ordered after it."""
    _sizes: Sequence[int] = ()
    _parts: list[Tensor] = field(default_factory=list)
    """One after another, each with dtype and shape of its last tensor."""

    def divide(self, sizes: Sequence[int]) -> None:
        """Make a part of each size, at multiples of `ALIGNMENT`."""
        if sizes != self._sizes:
            starts = accumulate(map(_aligned, sizes), initial=0)
            self._sizes = sizes
            self._parts = [self.memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def part(self, at: int, tensor: Tensor) -> Tensor:
        """Return part `at` with dtype and shape of this contiguous tensor of its size."""
        part = self._parts[at]
        if part.dtype is not tensor.dtype or part.shape != tensor.shape:
            part = self._parts[at] = part.flatten().view(torch.uint8).view(tensor.dtype).view(tensor.shape)
        return part


class Lease:
    """A room in use. It is free again when the lease is dropped."""

    def __init__(self, room: Room, free: deque[Room]) -> None:
        self.room = room
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.room)


@dataclass
class _Shelf:
    """Rooms of one size. A room returns at any time."""

    room_bytes: int
    rooms: int = 0
    free: deque[Room] = field(default_factory=deque)


class HostMemory:
    def __init__(self, where: str, device: Device, limit: HostLimit) -> None:
        self._where, self._device, self._limit = where, device, limit
        self._locked: Slab | None = None
        """Locked before sizes were known, while it has space left."""
        self._shelves: dict[Hashable, _Shelf] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all rooms, without those of replaced shelves."""
        return sum(shelf.rooms * shelf.room_bytes for shelf in self._shelves.values())

    def lock(self, size_bytes: int) -> None:
        """Page-lock memory from which rooms are cut later. Raises `OffloadError` if the host has too little."""
        self._locked = Slab(self._where, size_bytes, self._device, self._limit)

    def lend(self, key: Hashable, sizes: Sequence[int]) -> Lease:
        """Return a room with a part of each size from the shelf `key`. Raises `OffloadError`."""
        needed_bytes = sum(map(_aligned, sizes))
        if key not in self._shelves or self._shelves[key].room_bytes < needed_bytes:
            self._replace(key, needed_bytes)
        shelf = self._shelves[key]
        if not shelf.free:
            self._grow(shelf)
        room = shelf.free.popleft()
        room.divide(sizes)
        return Lease(room, shelf.free)

    def clear(self) -> None:
        """Free all memory that is not lent. A slab with lent rooms counts until they return."""
        self._shelves, self._locked = {}, None

    def _replace(self, key: Hashable, needed_bytes: int) -> None:
        """Begin a shelf of larger rooms: of an eighth more than needed, to fit later sizes, if there was one before and the limit
        allows as many. The slab of the old one is freed with the last of its rooms."""
        rooms = self._shelves.pop(key).rooms if key in self._shelves else 0
        locked_bytes = self._locked.left_bytes if self._locked is not None else 0
        roomy_bytes = _aligned(needed_bytes + needed_bytes // 8)
        fits = 0 < rooms * roomy_bytes <= self._limit.free_bytes + locked_bytes
        self._shelves[key] = _Shelf(roomy_bytes if fits else needed_bytes)

    def _grow(self, shelf: _Shelf) -> None:
        if self._locked is None or self._locked.left_bytes < shelf.room_bytes:
            self._locked = None  # it is freed with its rooms
        slab = self._locked or Slab(self._where, shelf.room_bytes, self._device, self._limit)
        shelf.free.append(Room(slab.cut(shelf.room_bytes), slab))
        shelf.rooms += 1
        log.info("%s: %s of host memory for offloaded activations", self._where, format_bytes(self.bytes))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def bytes_ahead(policy_bytes: int, smallest_tensor_bytes: int) -> int:
    """Return the most bytes of rooms for this policy: each tensor may waste a part of its last unit."""
    tensors = policy_bytes // max(smallest_tensor_bytes, MANY * ALIGNMENT) + 2
    return _aligned(policy_bytes) + tensors * ALIGNMENT
