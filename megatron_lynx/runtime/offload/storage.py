"""Storages of tensors that may move to host memory, and what autograd and frames store in place of the tensors.

    tensor ──push──> OffloadedTensor: a view of an OffloadedStorage

    original ──send──> a room on the host ──fetch──> fresh tensor         a part of it, if the plan's bytes end inside it:
        └── freed when that copy is over              └── waited for      the rest stays in its own tensor

Reloads go into fresh tensors: each is freed once backward has passed its node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.device import Copier, Copy, Pair
from megatron_lynx.runtime.offload.host_memory import Lease
from megatron_lynx.runtime.saved import View, without_parts


class OffloadedStorage:
    """One storage of one micro-batch: on the device, (partly) on the host, or back on the device."""

    def __init__(self, saved: Tensor, storage: torch.UntypedStorage, micro_batch: int, back: Copier) -> None:
        """`saved`: the first tensor in this storage that was pushed."""
        self.size_bytes = storage.nbytes()
        self.whole = saved.nbytes == self.size_bytes and saved.is_contiguous()
        """Whether that tensor fills the storage."""
        self.device = storage.device
        self._original: Tensor | None = saved.detach() if self.whole else _bytes_of(storage)
        self.dtype, self.shape = self._original.dtype, self._original.shape
        self._micro_batch = micro_batch
        self._rest: Tensor | None = None
        self._lease: Lease | None = None
        self._hosted: Tensor | None = None
        self._out: Copy | None = None
        self._back: Copy | None = None
        self._copier = back
        self._returned: Tensor | None = None

    @property
    def here(self) -> bool:
        return self._original is not None

    def tensor(self) -> Tensor:
        """Return the tensor that it was made for, or its bytes. Compute that follows waits for its copy back."""
        if self._out is None:
            assert self._original is not None
            return self._original
        fetch([self])
        if self._back is not None:
            self._copier.wait(self._back)
            self._back = None
            self._let_go()
        assert self._returned is not None
        return self._returned

    def _let_go(self) -> None:
        """Free the original: its copy to the host is over, or compute waits for it."""
        if self._out is not None:
            self._out.release()
        self._original = None

    def _copy_to_host(self, lease: Lease, at: int, size_bytes: int) -> Pair:
        """Return the copy of the first `size_bytes` to part `at` of a room; the rest, if any, is cloned."""
        original = self._original
        assert original is not None
        if size_bytes < self.size_bytes:
            all_bytes = _bytes_of(original.untyped_storage())
            original, self._rest = all_bytes[:size_bytes], all_bytes[size_bytes:].clone()
        self._lease, self._hosted = lease, lease.room.part(at, original)
        return self._hosted, original

    def _copy_to_device(self) -> Pair:
        hosted, self._hosted = self._hosted, None
        assert hosted is not None
        target = self._returned = self._fresh()
        if self._rest is not None:
            all_bytes = _bytes_of(target.untyped_storage())
            target = all_bytes[: hosted.nbytes]
            all_bytes[hosted.nbytes :].copy_(self._rest)
            self._rest = None
        return target, hosted

    def _fresh(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class OffloadedTensor:
    """A tensor that is an offloaded storage, or a view of it. Autograd and frames store it instead of the tensor."""

    __slots__ = ("requires_grad", "storage", "view")

    def __init__(self, tensor: Tensor, storage: OffloadedStorage) -> None:
        self.storage = storage
        self.requires_grad = tensor.requires_grad
        same = storage.whole and tensor.dtype is storage.dtype and tensor.shape == storage.shape and tensor.is_contiguous()
        self.view = None if same else View.of(tensor)

    def tensor(self) -> Tensor:
        """Return a tensor with size, stride, offset, dtype and bits of the one that was pushed. May be called again."""
        base = self.storage.tensor()
        return base if self.view is None else self.view.in_(base)


class OffloadedWrapper:
    """A wrapper around the bytes and scales of a quantized matrix, with `OffloadedTensor`s in place of those that may leave."""

    __slots__ = ("like", "parts")

    def __init__(self, wrapper: Tensor, parts: Mapping[str, Any]) -> None:
        self.like, self.parts = without_parts(wrapper), parts

    def tensor(self) -> Tensor:
        parts = {name: part if isinstance(part, Tensor) else part.tensor() for name, part in self.parts.items()}
        return self.like(parts)  # type: ignore[no-any-return]


def on_device(value: Any) -> Any:
    return map_nest(OffloadedTensor, lambda one: one.tensor().detach().requires_grad_(one.requires_grad), value)


def fetch(storages: Iterable[OffloadedStorage]) -> None:
    """Start one copy back of those storages of a half that are on the host, the last one first."""
    coming = [storage for storage in reversed(list(storages)) if storage._lease is not None]
    if not coming:
        return
    first = coming[0]
    back = first._copier.start([storage._copy_to_device() for storage in coming], first._micro_batch, [first._out])
    for storage in coming:
        assert storage._lease is not None
        storage._back = storage._lease.room.last = back
        storage._lease = None
