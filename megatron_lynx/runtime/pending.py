"""Pending weight gradients: one FIFO queue per linear.

    backward of linear_fc1(3) ──> Entry: operands, computation ──┐
                                                                 ▼
    linear_fc1(3)   [micro-batch 0] [micro-batch 1]          a wait, or a flush ──> the oldest of a linear, or of a chunk
    experts_fc1(3)  [0, expert 0] [0, expert 1] [1, ...      a wait takes those of all experts of a micro-batch
    linear_fc2(3)   [0, piece 0] [0, piece 1] [1, piece 0]   a wait takes one piece; the operands stay until the last one

Additions to a parameter's gradient keep their order, so that each sum equals stock's in every bit. An entry owns its operands,
and their bytes count until it is computed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lynx.anatomy import Half

Linear = tuple[int, str]
"""(layer, item)."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One weight gradient of one micro-batch."""

    linear: Linear
    """For experts, their item: experts that run one by one have an entry each."""
    half: Half
    chunk: int
    micro_batch: int
    """Number over the whole run."""
    compute: Callable[[], object]
    """Adds the weight gradient to where it belongs."""
    blocks: Mapping[int, int]
    """Bytes of each block of memory that its operands hold, by address. Entries of experts may share blocks."""
    surroundings: Any = ()
    piece: int = 0
    """Which of the pieces of its weight gradient; for experts, which group of them."""

    def joins(self, other: Entry) -> bool:
        """Return whether it runs in the same wait as an earlier entry of its linear."""
        return (self.micro_batch, self.piece) == (other.micro_batch, other.piece)


class Pending:
    def __init__(self) -> None:
        self._of: dict[Linear, deque[Entry]] = {}
        self._in_order: dict[int, dict[Entry, None]] = {}
        """Entries of each chunk, oldest first."""
        self._bytes: Counter[int] = Counter()
        self._holders: Counter[tuple[int, int]] = Counter()
        """How many entries hold a block, by (chunk, address)."""

    def __len__(self) -> int:
        return sum(map(len, self._in_order.values()))

    @property
    def bytes(self) -> int:
        """Bytes that all entries hold."""
        return self._bytes.total()

    def bytes_of(self, chunk: int) -> int:
        return self._bytes[chunk]

    def bytes_with(self, chunk: int, blocks: Mapping[int, int]) -> int:
        """Return the chunk's bytes after one more entry with these blocks."""
        return self.bytes_of(chunk) + sum(size for block, size in blocks.items() if not self._holders[chunk, block])

    def add(self, entry: Entry) -> None:
        self._of.setdefault(entry.linear, deque()).append(entry)
        self._in_order.setdefault(entry.chunk, {})[entry] = None
        self._bytes[entry.chunk] = self.bytes_with(entry.chunk, entry.blocks)
        self._holders.update((entry.chunk, block) for block in entry.blocks)

    def take(self, linear: Linear, taken: Entry | None = None) -> Entry | None:
        """Remove and return the oldest entry of a linear; None if there is none or it does not join the one `taken` before."""
        queue = self._of.get(linear)
        if not queue or not (taken is None or queue[0].joins(taken)):
            return None
        entry = queue.popleft()
        del self._in_order[entry.chunk][entry]
        self._holders.subtract((entry.chunk, block) for block in entry.blocks)
        for block, size in entry.blocks.items():
            if not self._holders[entry.chunk, block]:
                del self._holders[entry.chunk, block]
                self._bytes[entry.chunk] -= size
        return entry

    def take_oldest(self, chunk: int) -> Entry | None:
        """Remove and return the oldest entry of a chunk, or None."""
        oldest = next(iter(self._in_order.get(chunk, ())), None)
        return None if oldest is None else self.take(oldest.linear)

    def clear(self) -> None:
        self._of.clear()
        self._in_order.clear()
        self._bytes.clear()
        self._holders.clear()


def blocks_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage that the tensors keep alive, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
