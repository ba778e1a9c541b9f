"""The figures of PyTorch's allocator when it had no more, read from its message: by now much was let go again.

capacity of the device   = used by others + allocated + reserved and not allocated + free
would a fitting block do = asked for <= free + reserved and not allocated        (fragmentation alone)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_lynx.units import GIB, KIB, MIB

_UNITS = {"B": 1, "bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}
_SIZE = r"([\d.]+) (B|bytes|KiB|MiB|GiB)"
_CAPACITY = re.compile(rf"total capac\w+ of {_SIZE}")
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated")
_UNUSED = re.compile(rf"and {_SIZE} is reserved by PyTorch but unallocated")


@dataclass(frozen=True)
class Allocator:
    """One device when it ran out of memory. Figures are as rounded as PyTorch prints them."""

    asked_bytes: int
    allocated_bytes: int
    unused_bytes: int
    """Reserved and not allocated."""
    free_bytes: int
    """Not even reserved."""
    capacity_bytes: int | None = None
    """Of the device; None where the message does not say."""

    @property
    def limit_bytes(self) -> int:
        """What PyTorch could use of the device."""
        return self.allocated_bytes + self.unused_bytes + self.free_bytes

    @property
    def outside_bytes(self) -> int | None:
        """What others than PyTorch's allocator use: context, libraries, NCCL, other processes."""
        return None if self.capacity_bytes is None else max(0, self.capacity_bytes - self.limit_bytes)

    @property
    def needed_bytes(self) -> int:
        return self.allocated_bytes + self.asked_bytes

    @property
    def lacking_bytes(self) -> int:
        """What is missing even if every byte that is not allocated could be used; 0 where fragmentation alone is to blame."""
        return max(0, self.needed_bytes - self.limit_bytes)

    @classmethod
    def of(cls, error: BaseException) -> Allocator | None:
        """Its figures, or None where the message has none (a library's own memory, say)."""
        text = str(error)
        asked, allocated = _bytes(_ASKED, text), _bytes(_ALLOCATED, text)
        if asked is None or allocated is None:
            return None
        return cls(asked, allocated, _bytes(_UNUSED, text) or 0, _bytes(_FREE, text) or 0, _bytes(_CAPACITY, text))


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else round(float(found.group(1)) * _UNITS[found.group(2)])
