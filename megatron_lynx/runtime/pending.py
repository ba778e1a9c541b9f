"""Weight gradients that were deferred and are still to be computed: one queue for each linear, first in, first out.

    backward of linear_fc1(3) ──> Entry: operands, and what computes with them ──┐
                                                                                 ▼
    linear_fc1(3)   [micro-batch 0] [micro-batch 1]          a wait, or a flush ──> the oldest of a linear, or of a chunk
    experts_fc1(3)  [0, expert 0] [0, expert 1] [1, ...      a wait takes those of all experts of a micro-batch

Each addition to a parameter's gradient keeps its place among those to the same parameter, so that every sum is stock's in each
bit. An entry owns what it reads: nobody else may overwrite it, and it counts until the entry is computed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lynx.anatomy import Half

Linear = tuple[int, str]
"""(layer, item): whose weight gradient it is."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One weight gradient of one micro-batch."""

    linear: Linear
    """For experts, their item: experts that run one by one have an entry each."""
    half: Half
    chunk: int
    micro_batch: int
    """Its number over the whole run."""
    compute: Callable[[], None]
    """Adds the weight gradient to where it belongs."""
    blocks: Mapping[int, int]
    """The blocks of memory that its operands hold, by address: their bytes. Experts' may look into the same ones."""
    surroundings: Any = ()


class Pending:
    """The entries of one engine."""

    def __init__(self) -> None:
        self._of: dict[Linear, deque[Entry]] = {}
        self._in_order: dict[int, dict[Entry, None]] = {}
        """The entries of each chunk, the oldest first."""
        self._bytes: Counter[int] = Counter()
        self._holders: Counter[tuple[int, int]] = Counter()
        """How many entries hold a block, by chunk and address."""

    def __len__(self) -> int:
        return sum(map(len, self._in_order.values()))

    @property
    def bytes(self) -> int:
        """Bytes that all entries hold."""
        return self._bytes.total()

    def bytes_of(self, chunk: int) -> int:
        """Bytes that the entries of a chunk hold."""
        return self._bytes[chunk]

    def bytes_with(self, chunk: int, blocks: Mapping[int, int]) -> int:
        """Bytes that they would hold with one more."""
        return self.bytes_of(chunk) + sum(size for block, size in blocks.items() if not self._holders[chunk, block])

    def add(self, entry: Entry) -> None:
        self._of.setdefault(entry.linear, deque()).append(entry)
        self._in_order.setdefault(entry.chunk, {})[entry] = None
        self._bytes[entry.chunk] = self.bytes_with(entry.chunk, entry.blocks)
        self._holders.update((entry.chunk, block) for block in entry.blocks)

    def take(self, linear: Linear, micro_batch: int | None = None) -> Entry | None:
        """The oldest one of a linear, which is no longer pending; None where there is none, or where it is not of the
        `micro_batch` that is asked for."""
        queue = self._of.get(linear)
        if not queue or micro_batch not in (None, queue[0].micro_batch):
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
        """The oldest one of a chunk, likewise."""
        oldest = next(iter(self._in_order.get(chunk, ())), None)
        return None if oldest is None else self.take(oldest.linear)

    def clear(self) -> None:
        """Forget all of them."""
        self._of.clear()
        self._in_order.clear()
        self._bytes.clear()
        self._holders.clear()


def blocks_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """What tensors keep alive, by address: the whole of the memory that they look into, once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
