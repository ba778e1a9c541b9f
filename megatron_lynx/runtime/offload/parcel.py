"""What autograd would have kept on the device: one storage of one micro-batch, wherever its bytes are, and views of it.

    original ──send──> block on the host ──fetch──> fresh tensor          a part of it, if the plan's bytes end inside it:
        └── let go when that copy is over             └── waited for      the rest stays in a tensor of its own

Parcels of one half go together and come back together: one copy, one wait.

Reloads go into fresh tensors of exactly the parcel's size: each is freed as soon as backward has passed its node. Two buffers
that are filled in turns would hold two micro-batches' bytes all the time (`benchmarks/reload_targets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.offload.copier import Copier, Copy, Owner, Pair, failed
from megatron_lynx.runtime.offload.host_memory import Block


class Parcel:
    """One storage of one micro-batch: on the device, or a part of it on the host, or back on the device.

    Where it was made for a tensor that is all of it, as most are, that tensor is copied, and what comes back is one like it.
    Otherwise its bytes are.
    """

    def __init__(self, saved: Tensor, storage: torch.UntypedStorage, owner: Owner, back: Copier, half: int) -> None:
        """`saved`: a tensor in this storage, the first one that was to go."""
        self.size_bytes = storage.nbytes()
        self.whole = saved.nbytes == self.size_bytes and saved.is_contiguous()
        """Whether that tensor is all of it."""
        self.half = half
        """The how-manieth half of its micro-batch's forward made it."""
        self.device = storage.device
        self._original: Tensor | None = saved.detach() if self.whole else _bytes_of(storage)
        self._dtype, self._shape = self._original.dtype, self._original.shape
        self._owner = owner
        self._rest: Tensor | None = None
        self._block: Block | None = None
        self._hosted: Tensor | None = None
        """What of the block it fills."""
        self._out: Copy | None = None
        self._back: Copy | None = None
        self._copier = back
        self._returned: Tensor | None = None

    def is_all_of(self, tensor: Tensor) -> bool:
        """Whether this tensor in its storage is what it was made for."""
        return self.whole and tensor.dtype is self._dtype and tensor.shape == self._shape and tensor.is_contiguous()

    @property
    def here(self) -> bool:
        """Whether its original is still on the device."""
        return self._original is not None

    @property
    def on_host(self) -> bool:
        """Whether nobody has asked for it back yet."""
        return self._block is not None

    def settle(self) -> None:
        """Let the original go if its copy is over. One that failed is told by whoever waits for it, at a place that does not
        depend on when it failed (rule R1)."""
        if self._out is not None and self._original is not None and self._out.done and self._out.error is None:
            self._let_go()

    def release(self, out: Copier) -> None:
        """Let the original go, behind its copy."""
        if self._out is not None and self._original is not None:
            out.wait(self._out)
            self._let_go()

    def tensor(self) -> Tensor:
        """It, on the device: the tensor that it was made for, or its bytes. What comes behind this comes behind its copy back."""
        if self._out is None:
            assert self._original is not None
            return self._original
        if self.on_host:
            fetch([self])
        if self._back is not None:
            if not self._back.well:
                self._copier.wait(self._back)
            self._back = None
            if self._original is not None:
                self._let_go()
        assert self._returned is not None
        return self._returned

    def _let_go(self) -> None:
        """Its copy to the host is over, on the device's timeline too."""
        if self._out is not None:
            self._out.let_go()
        self._original = None

    def _going(self, block: Block, size_bytes: int) -> Pair:
        """The first `size_bytes` are to go to the host; the rest, if any, stays in a tensor of its own."""
        original = self._original
        assert original is not None
        self._block = block
        if size_bytes == self.size_bytes:
            self._hosted = block.like(original)
        else:
            all_bytes = _bytes_of(original.untyped_storage())
            self._hosted, original, self._rest = block.tensor[:size_bytes], all_bytes[:size_bytes], all_bytes[size_bytes:].clone()
        return self._hosted, original

    def _coming(self) -> Pair:
        hosted, self._hosted = self._hosted, None
        assert hosted is not None
        target = self._returned = self._fresh(hosted.nbytes)
        if self._rest is not None:
            all_bytes = _bytes_of(target.untyped_storage())
            target = all_bytes[: hosted.nbytes]
            all_bytes[hosted.nbytes :].copy_(self._rest)
            self._rest = None
        return target, hosted

    def _fresh(self, sent: int) -> Tensor:
        try:
            return torch.empty(self._shape, dtype=self._dtype, device=self.device)
        except Exception as error:
            raise failed("reload", self._owner, sent, error) from error


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def send(departing: Sequence[tuple[Parcel, int, Block]], out: Copier) -> Copy:
    """Copy so many bytes of each to its block, all at once. They are of one half."""
    pairs = [parcel._going(block, size_bytes) for parcel, size_bytes, block in departing]
    copy = out.start(pairs, departing[0][0]._owner, [block.last for _, _, block in departing])
    for parcel, _, block in departing:
        parcel._out = block.last = copy
    return copy


def fetch(parcels: Sequence[Parcel]) -> None:
    """Copy what is on the host back, all at once."""
    pairs = [parcel._coming() for parcel in parcels]
    back = parcels[0]._copier.start(pairs, parcels[0]._owner, [parcel._out for parcel in parcels])
    for parcel in parcels:
        assert parcel._block is not None
        parcel._back = parcel._block.last = back
        parcel._block = None


class Hosted:
    """A tensor that is a parcel, or a view of it: what autograd and frames hold instead of it."""

    __slots__ = ("parcel", "requires_grad", "view")

    def __init__(self, tensor: Tensor, parcel: Parcel) -> None:
        self.parcel = parcel
        self.requires_grad = tensor.requires_grad
        self.view = None if parcel.is_all_of(tensor) else _View.of(tensor)

    def tensor(self) -> Tensor:
        """Same size, stride, offset, type and bits as the one that was packed. Can be asked for again."""
        parcel, view = self.parcel.tensor(), self.view
        if view is None:
            return parcel
        empty = torch.empty(0, dtype=view.dtype, device=parcel.device)
        return empty.set_(parcel.untyped_storage(), view.offset, view.size, view.stride)


class _View(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def on_device(value: Any) -> Any:
    """The same nest with tensors in place of handles."""
    return map_nest(Hosted, lambda hosted: hosted.tensor().detach().requires_grad_(hosted.requires_grad), value)
