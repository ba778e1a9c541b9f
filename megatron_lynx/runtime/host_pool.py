"""Host memory for offloaded activations: blocks of exact sizes, made once, lent again and again.

    first micro-batch    sizes known ──> one slab, page-locked on CUDA: `sets` x sizes      ┌────┬──┬───┬────┬──┬───┐
    every micro-batch    lend: for each size the smallest free block that holds it          └────┴──┴───┴────┴──┴───┘
    a block's end        it is free again, but for the copy that still reads it: the next copy into it comes behind that one
    other sizes          a new slab; the old one goes with the last of its blocks, and the log says so

PyTorch's own page-locked allocator rounds up to powers of two; a slab is as large as what was asked for, up to pages. Slabs do
not come from PyTorch's allocators, so no counter takes them for activations.
"""

from __future__ import annotations

import logging
import mmap
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.runtime.host_memory import HostLimit, too_little
from megatron_lynx.runtime.transfer import Copy
from megatron_lynx.units import format_bytes

log = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes; where blocks begin."""


class Slab:
    """One stretch of host memory, page-locked for a CUDA device. It goes when nobody holds it or a block of it."""

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._locked = False
        if device.type == "cuda":
            with _on_node_of(device):
                _check_cuda(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size_bytes, 0))
            self._locked = True  # what was never locked must not be unlocked: CUDA would remember that error for a later kernel

    def __del__(self) -> None:
        if getattr(self, "_locked", False):
            torch.cuda.synchronize()  # copies may be under way; it happens when sizes change and at the end
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())


class _Shelved(NamedTuple):
    tensor: Tensor
    slab: Slab
    reader: Copy | None


class Block:
    """Host memory that one storage's bytes have until the block is dropped."""

    def __init__(self, shelved: _Shelved, shelf: deque[_Shelved]) -> None:
        self.tensor = shelved.tensor
        reader = shelved.reader
        self.last: Copy | None = reader if reader is None or reader.error is None else None
        """The last copy that has to do with it; the next one comes behind it. One that failed is over, and breaks no other."""
        self._slab = shelved.slab
        self._shelf = shelf

    def __del__(self) -> None:
        self._shelf.append(_Shelved(self.tensor, self._slab, self.last))


class HostPool:
    """The blocks of one chunk. `sets`: how many micro-batches are on the host at once, at most, as far as is known before."""

    def __init__(self, where: str, device: torch.device, limit: HostLimit, sets: int) -> None:
        self.where = where
        self.bytes = 0
        """Of all slabs in use. Not of one that was replaced and whose last block is still lent."""
        self._device = device
        self._limit = limit
        self._sets = max(1, sets)
        self._sizes: list[int] = []
        self._shelf: deque[_Shelved] = deque()

    def lend(self, sizes: Sequence[int]) -> list[Block]:
        """A block of at least each size. Raises `OffloadError` where the host has no room for as many."""
        chosen = self._fitting(sizes)
        if chosen is None:
            self._make_room(sizes)
            chosen = self._fitting(sizes)
        assert chosen is not None, f"{self.where}: no room for {sizes} after it was made"
        return [Block(shelved, self._shelf) for shelved in chosen]

    def clear(self) -> None:
        """Give everything back that is not lent."""
        self._limit.held_bytes -= self.bytes
        self._shelf, self._sizes, self.bytes = deque(), [], 0

    def _fitting(self, sizes: Sequence[int]) -> list[_Shelved] | None:
        """Best fit, largest first; None, with nothing taken, where one size finds no block."""
        free = [self._shelf.popleft() for _ in range(len(self._shelf))]
        free.sort(key=lambda shelved: shelved.tensor.nbytes)
        left, chosen = list(free), {}
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            at = bisect_left(left, sizes[index], key=lambda shelved: shelved.tensor.nbytes)
            if at == len(left):
                self._shelf.extend(free)
                return None
            chosen[index] = left.pop(at)
        self._shelf.extend(left)
        return [chosen[index] for index in range(len(sizes))]

    def _make_room(self, sizes: Sequence[int]) -> None:
        ordered = sorted(sizes, reverse=True)
        known = len(ordered) <= len(self._sizes) and all(a <= b for a, b in zip(ordered, self._sizes, strict=False))
        before = self.bytes
        if known:
            self._sets += 1
            self._add(1)
            log.warning("%s: one more micro-batch on the host than before; %s", self.where, self._change(before))
            return
        self.clear()
        self._sizes = ordered
        self._add(self._sets)
        if before:
            log.warning("%s: activations have other sizes than before; %s", self.where, self._change(before))
        else:
            log.info("%s: %s", self.where, self._change(before))

    def _change(self, before: int) -> str:
        return f"host memory for offloaded activations: {format_bytes(before)} before, {format_bytes(self.bytes)} now"

    def _add(self, sets: int) -> None:
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in self._sizes]
        size_bytes = sets * sum(padded)
        needed_bytes, most_bytes = self._limit.held_bytes + size_bytes, self._limit.most_bytes
        if needed_bytes > most_bytes:
            raise too_little(self.where, needed_bytes, most_bytes)
        try:
            slab = Slab(size_bytes, self._device)
        except (OSError, MemoryError, RuntimeError) as error:
            raise too_little(self.where, needed_bytes, most_bytes) from error
        self.bytes += size_bytes
        self._limit.held_bytes += size_bytes
        start = 0
        for size, room in [*zip(self._sizes, padded, strict=True)] * sets:
            self._shelf.append(_Shelved(slab.tensor[start : start + size], slab, None))
            start += room


def _check_cuda(status: object) -> None:
    if int(status) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"cudaHostRegister returned {status}")


@contextmanager
def _on_node_of(device: torch.device) -> Iterator[None]:
    """Page-locking touches the pages, and they come from the node of the processor that does: let it be the device's own."""
    processors = _processors_near(device)
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _processors_near(device: torch.device) -> set[int]:
    """Of the device's NUMA node, as far as this process may run there; empty where the machine does not say."""
    facts: Any = torch.cuda.get_device_properties(device)
    if not hasattr(facts, "pci_bus_id"):  # before torch 2.8
        return set()
    address = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
    listed = Path("/sys/bus/pci/devices", address, "local_cpulist")
    if not listed.exists() or not hasattr(os, "sched_getaffinity"):
        return set()
    spans = [part.split("-") for part in listed.read_text().strip().split(",") if part]
    near = {number for span in spans for number in range(int(span[0]), int(span[-1]) + 1)}
    return near & os.sched_getaffinity(0)
