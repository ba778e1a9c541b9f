"""Userbuffers: a buffer for each exchange, in which tensor-parallel ranks' parts come together beside a matrix product.

    gathered      own part copied in ──> product: first every rank's part is fetched, then it reads the buffer
    scattered     product: written into the buffer, then summed up over ranks; the own part is handed out
    in bulk       the same beside a product that reads and writes something else

On a GPU pieces travel while pieces are multiplied; here one comes after the other. As there, a buffer serves all layers, so that
whatever runs out of turn overwrites what another layer is about to read. Ranks exchange over a group of Transformer Engine's
own, in which nobody looks for windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.instruments.transformer_engine.enums import CommOverlapType

__all__ = [
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "device_supports_multicast",
    "get_stream_priority_range",
    "ubuf_built_with_mpi",
]


class CommOverlapHelper:
    """Which ranks exchange: those of the second group."""

    def __init__(self, world: Any = None, tensor_parallel: Any = None) -> None:
        self.group = tensor_parallel


class CommOverlap:
    """One buffer, of `shape` on every rank."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, helper: CommOverlapHelper, ranks: int, *_: Any, **__: Any
    ) -> None:
        self._buffer = torch.zeros(tuple(shape), dtype=dtype)
        self._group, self._ranks = helper.group, ranks
        self.exchanges = 0
        """How many there have been."""

    def is_fp8_ubuf(self) -> bool:
        return self._buffer.dtype == torch.uint8

    def with_cublasmp(self) -> bool:
        return False

    def copy_into_buffer(self, tensor: torch.Tensor, local_chunk: bool = False) -> None:
        self.get_buffer(local_chunk).copy_(tensor.detach().reshape(-1, self._buffer.shape[-1]))

    def get_buffer(self, local_chunk: bool = False, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The buffer itself, or the rank's part of it."""
        part = self._buffer.chunk(self._ranks)[dist.get_rank(self._group)] if local_chunk else self._buffer
        return part if shape is None else part.view(*shape)

    def exchange(self, kind: Any) -> None:
        """Fetch every rank's part, or sum the whole up over ranks, of which the own part is kept."""
        self.exchanges += 1
        if CommOverlapType(int(kind)) is CommOverlapType.AG:
            parts = list(self._buffer.chunk(self._ranks))
            dist.all_gather(parts, self.get_buffer(local_chunk=True).clone(), group=self._group)
        else:
            whole = self._buffer.clone()
            dist.all_reduce(whole, group=self._group)
            own = whole.chunk(self._ranks)[dist.get_rank(self._group)]
            self.get_buffer(local_chunk=True).copy_(own)

    def scatter(self, product: torch.Tensor, output: torch.Tensor) -> None:
        """Sum a product up over ranks; the own part goes to `output`."""
        self.copy_into_buffer(product)
        self.exchange(CommOverlapType.RS)
        output.copy_(self.get_buffer(local_chunk=True).view_as(output))


class CommOverlapP2P(CommOverlap):
    """The same on a GPU from neighbour to neighbour."""


def ubuf_built_with_mpi() -> bool:
    return False


def device_supports_multicast(device: int = -1) -> bool:
    return True


def get_stream_priority_range(device: int = -1) -> tuple[int, int]:
    return 0, 0
