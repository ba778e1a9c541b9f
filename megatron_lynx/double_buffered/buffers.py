"""Two buffers for the memory of some tensors, which are pointed from one buffer to the other.

A tensor keeps its identity, its attributes and its place in the graph; `tensor.data` is what looks elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class TwoBuffers:
    """The memory that `tensors` look into is buffer 0, and a second one, filled with zeros, buffer 1."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        first = [storage for storage in storages.values() if storage.nbytes()]
        twins = [torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device) for storage in first]
        self._buffers = first, [twin.untyped_storage() for twin in twins]
        self._place = {storage.data_ptr(): index for buffer in self._buffers for index, storage in enumerate(buffer)}

    @property
    def extra_bytes(self) -> int:
        """The size of the second buffer."""
        return sum(storage.nbytes() for storage in self._buffers[1])

    def point(self, tensors: Iterable[torch.Tensor], buffer: int) -> None:
        """Point those of `tensors` that lie in either buffer to the same place in this one."""
        for tensor in tensors:
            index = self._place.get(tensor.untyped_storage().data_ptr())
            if index is not None:
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                storage = self._buffers[buffer][index]
                tensor.data = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def copy(self, source: int, target: int) -> None:
        """Copy one buffer's bytes over the other's."""
        for original, copied in zip(self.memory(source), self.memory(target), strict=True):
            copied.copy_(original)

    def memory(self, buffer: int) -> list[torch.Tensor]:
        """The bytes of one buffer."""
        empties = [torch.empty(0, dtype=torch.uint8, device=storage.device) for storage in self._buffers[buffer]]
        return [
            empty.set_(storage, 0, (storage.nbytes(),), (1,))
            for empty, storage in zip(empties, self._buffers[buffer], strict=True)
        ]
