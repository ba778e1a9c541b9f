"""Host memory for offloaded activations: how much a rank may hold, and blocks of exact sizes, made once, lent again and again.

    the machine           MemAvailable                                       the least of these, shared by the ranks of the host,
    control groups        limit - in use + page cache, of every one          is what one rank may hold in all its pools

    first micro-batch     sizes known ──> room for `sets` micro-batches is set aside         ┌────┬──┬───┐┌────┬──┬───┐
    every micro-batch     lend: for each size the smallest free block that holds it;         └────┴──┴───┘└────┴──┴───┘
                          where none is, and room is left, one more slab, page-locked on CUDA: one micro-batch's
    a block's end         it is free again, but for the copy that still reads it: the next copy into it comes behind that one
    other sizes           a new slab; the old one goes with the last of its blocks, and the log says so. Of experts they only grow

Page-locking takes the host seconds for tens of GB. So a slab holds one micro-batch: warm-up's forwards lock what they need, one
behind the other, and not the first of them all of it.

PyTorch's own page-locked allocator rounds up to powers of two; a slab is as large as what was asked for, up to pages. Slabs do
not come from PyTorch's allocators, so no counter takes them for activations.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError, Problem
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.offload.copier import Copy
from megatron_lynx.units import format_bytes

log = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes; where blocks begin."""


@dataclass
class HostLimit:
    """What one rank may hold of its host's memory, all its pools together."""

    most_bytes: int
    held_bytes: int = 0


def too_little(where: str, needed_bytes: int, found_bytes: int) -> OffloadError:
    """The host has too little memory for what a plan offloads."""
    problem = Problem(
        f"{where}: host memory for offloaded activations",
        f"{found_bytes} bytes ({format_bytes(found_bytes)}) available to this rank",
        f"{needed_bytes} bytes ({format_bytes(needed_bytes)})",
        "lower offload.bytes in the plan, or start fewer ranks on a host",
    )
    return OffloadError("the host has too little memory", [problem])


class Slab:
    """One stretch of host memory, page-locked for the device. It goes when nobody holds it or a block of it."""

    def __init__(self, size_bytes: int, device: Device) -> None:
        self.tensor = torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)
        device.lock(self.tensor)
        # Only what was locked may be unlocked: CUDA would remember the error, and a later kernel would get it.
        weakref.finalize(self, device.unlock, self.tensor).atexit = False


class _Shelved(NamedTuple):
    tensor: Tensor
    slab: Slab
    reader: Copy | None
    shaped: Tensor
    """As the one that had it last saw it."""


class Block:
    """Host memory that one storage's bytes have until the block is dropped."""

    def __init__(self, shelved: _Shelved, shelf: deque[_Shelved]) -> None:
        self.tensor = shelved.tensor
        reader = shelved.reader
        self.last: Copy | None = reader if reader is None or reader.error is None else None
        """The last copy that has to do with it; the next one comes behind it. One that failed is over, and breaks no other."""
        self._slab = shelved.slab
        self._shaped = shelved.shaped
        self._shelf = shelf

    def like(self, tensor: Tensor) -> Tensor:
        """As many of its bytes as this contiguous tensor has, with its type and shape."""
        if self._shaped.dtype is not tensor.dtype or self._shaped.shape != tensor.shape:
            self._shaped = self.tensor[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return self._shaped

    def __del__(self) -> None:
        self._shelf.append(_Shelved(self.tensor, self._slab, self.last, self._shaped))


class HostPool:
    """The blocks of one chunk. `sets`: how many micro-batches are on the host at once, at most, as far as is known before.

    `ragged`: their sizes differ from one micro-batch to the next, as what experts keep does. Then blocks are a little larger than
    asked for, and never become smaller, so that soon no micro-batch asks for others.
    """

    def __init__(self, where: str, device: Device, limit: HostLimit, sets: int, *, ragged: bool = False) -> None:
        self.where = where
        self.bytes = 0
        """Set aside: of all slabs in use, and of those still to be made. Not of one that was replaced and whose last block is
        still lent."""
        self._device = device
        self._limit = limit
        self._sets = max(1, sets)
        self._ragged = ragged
        self._made = 0
        """Sets whose slab is there."""
        self._sizes: list[int] = []
        self._shelves: defaultdict[int, deque[_Shelved]] = defaultdict(deque)
        """By size. A block goes back to where it was taken from."""

    def lend(self, sizes: Sequence[int]) -> list[Block]:
        """A block of at least each size. Raises `OffloadError` where the host has no room for as many."""
        chosen = self._fitting(sizes)
        if chosen is None:
            if self._made == self._sets or not self._known(sizes):
                self._make_room(sizes)
            self._make_slab()
            chosen = self._fitting(sizes)
        assert chosen is not None, f"{self.where}: no room for {sizes} after it was made"
        return [Block(shelved, self._shelves[shelved.tensor.nbytes]) for shelved in chosen]

    def clear(self) -> None:
        """Give everything back that is not lent."""
        self._limit.held_bytes -= self.bytes
        self._shelves, self._sizes, self.bytes, self._made = defaultdict(deque), [], 0, 0

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
        wanted = self._roomier(sizes) if self._ragged else sorted(sizes, reverse=True)
        self.clear()
        self._sizes = wanted
        self._set_aside(self._sets)
        if before and not self._ragged:
            log.warning("%s: activations have other sizes than before; %s", self.where, self._change(before))
        else:
            log.info("%s: %s", self.where, self._change(before))

    def _roomier(self, sizes: Sequence[int]) -> list[int]:
        """By place in the order of sizes the most that was asked for, and an eighth more; as asked where that is too much."""
        ordered = sorted(sizes, reverse=True)
        most = [max(one, other) for one, other in zip_longest(self._sizes, (size + size // 8 for size in ordered), fillvalue=0)]
        free_bytes = self._limit.most_bytes - self._limit.held_bytes + self.bytes
        return most if self._sets * sum(map(_aligned, most)) <= free_bytes else ordered

    def _change(self, before: int) -> str:
        return f"host memory for offloaded activations: {format_bytes(before)} before, {format_bytes(self.bytes)} now"

    @property
    def _rooms(self) -> list[int]:
        """Bytes of one micro-batch's blocks in a slab."""
        return [_aligned(size) for size in self._sizes]

    def _set_aside(self, sets: int) -> None:
        size_bytes = sets * sum(self._rooms)
        needed_bytes, most_bytes = self._limit.held_bytes + size_bytes, self._limit.most_bytes
        if needed_bytes > most_bytes:
            raise too_little(self.where, needed_bytes, most_bytes)
        self.bytes += size_bytes
        self._limit.held_bytes += size_bytes

    def _make_slab(self) -> None:
        """For one micro-batch, of what was set aside."""
        try:
            slab = Slab(sum(self._rooms), self._device)
        except (OSError, MemoryError, RuntimeError) as error:
            raise too_little(self.where, self._limit.held_bytes, self._limit.most_bytes) from error
        self._made += 1
        start = 0
        for size, room in zip(self._sizes, self._rooms, strict=True):
            room_for_it = slab.tensor[start : start + size]
            self._put_back([_Shelved(room_for_it, slab, None, room_for_it)])
            start += room


def _size(shelved: _Shelved) -> int:
    return shelved.tensor.nbytes


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def available_bytes(ranks_on_host: int = 1, root: Path = Path("/")) -> int:
    """This rank's equal share of the memory that the operating system can still give, within the limits of its control groups.
    `root`: where the system's files are."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = root / "proc/meminfo"
    if meminfo.exists():
        found = _numbers_in(meminfo)["MemAvailable:"] * 1024
    for group in _control_groups(root):
        limit, used = group / "memory.max", group / "memory.current"
        if limit.exists() and used.exists() and (most := limit.read_text().strip()).isdigit():
            given_back = _numbers_in(group / "memory.stat").get("inactive_file", 0)  # page cache: what was read from files
            found = min(found, int(most) - int(used.read_text()) + given_back)
    return max(0, found) // ranks_on_host


def _control_groups(root: Path) -> Iterator[Path]:
    """This process's group, and all around it: the limit of each holds."""
    top, own = root / "sys/fs/cgroup", root / "proc/self/cgroup"
    yield top
    lines = own.read_text().splitlines() if own.exists() else []
    path = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    for part in Path(path).parts:
        top /= part
        yield top


def _numbers_in(file: Path) -> dict[str, int]:
    """The second word of each line, by its first one."""
    lines = (line.split() for line in file.read_text().splitlines()) if file.exists() else ()
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
