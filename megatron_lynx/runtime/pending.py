"""Weight gradients that were deferred and are still to be computed: one queue for each linear, first in, first out.

    backward of linear_fc1(3) ──> Entry: operands, and what computes with them ──┐
                                                                                 ▼
    linear_fc1(3)   [micro-batch 0] [micro-batch 1]          a wait, or a flush ──> the oldest of a linear, or of a chunk

Each addition to a parameter's gradient keeps its place among those to the same parameter, so that every sum is stock's in each
bit. An entry owns what it reads: nobody else may overwrite it, and it counts until the entry is computed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
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
    half: Half
    chunk: int
    micro_batch: int
    """Its number over the whole run."""
    compute: Callable[[], None]
    """Adds the weight gradient to where it belongs."""
    bytes: int
    """What its operands hold."""
    surroundings: Any = ()


class Pending:
    """The entries of one engine."""

    def __init__(self) -> None:
        self._of: dict[Linear, deque[Entry]] = {}
        self._in_order: dict[int, dict[Entry, None]] = {}
        """By chunk, the oldest first."""
        self._bytes: Counter[int] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._in_order.values()))

    @property
    def bytes(self) -> int:
        """What all entries hold."""
        return self._bytes.total()

    def bytes_of(self, chunk: int) -> int:
        """What the entries of a chunk hold."""
        return self._bytes[chunk]

    def add(self, entry: Entry) -> None:
        self._of.setdefault(entry.linear, deque()).append(entry)
        self._in_order.setdefault(entry.chunk, {})[entry] = None
        self._bytes[entry.chunk] += entry.bytes

    def take(self, linear: Linear) -> Entry | None:
        """The oldest one of a linear, which is no longer pending; None where there is none."""
        queue = self._of.get(linear)
        if not queue:
            return None
        entry = queue.popleft()
        del self._in_order[entry.chunk][entry]
        self._bytes[entry.chunk] -= entry.bytes
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


def bytes_held(tensors: Iterable[Tensor]) -> int:
    """What tensors keep alive: the whole of the memory that they look into, once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
