"""What autograd would have kept on the device: one storage of one micro-batch, wherever its bytes are, and views of it.

    original ──send──> block on the host ──fetch──> fresh tensor          a part of it, if the plan's bytes end inside it:
        └── let go when that copy is over             └── waited for      the rest stays in a tensor of its own

Parcels of one half go together and come back together: one copy, one wait.

Reloads go into fresh tensors of exactly the parcel's size: each is freed as soon as backward has passed its node. Two buffers
that are filled in turns would hold two micro-batches' bytes all the time (`benchmarks/reload_targets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.offload.copier import Copier, Copy, Owner, Pair, failed
from megatron_lynx.runtime.offload.host_memory import Block


class Parcel:
    """One storage of one micro-batch: on the device, or a part of it on the host, or back on the device."""

    def __init__(self, original: torch.UntypedStorage, owner: Owner, back: Copier, half: int) -> None:
        self.size_bytes = original.nbytes()
        self.half = half
        """The how-manieth half of its micro-batch's forward made it."""
        self.device = original.device
        self._original: torch.UntypedStorage | None = original
        self._owner = owner
        self._rest: Tensor | None = None
        self._block: Block | None = None
        self._out: Copy | None = None
        self._back: Copy | None = None
        self._copier = back
        self._returned: torch.UntypedStorage | None = None

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

    def storage(self) -> torch.UntypedStorage:
        """It, on the device; what comes behind this comes behind its copy back."""
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
        original = _bytes_of(self._original)
        self._block = block
        if size_bytes < self.size_bytes:
            self._rest = original[size_bytes:].clone()
            return block.tensor[:size_bytes], original[:size_bytes]
        return _first(block.tensor, size_bytes), original

    def _coming(self) -> Pair:
        assert self._block is not None
        sent = self.size_bytes - (self._rest.nbytes if self._rest is not None else 0)
        fresh = self._fresh(sent)
        self._returned = fresh.untyped_storage()
        if self._rest is not None:
            fresh[sent:].copy_(self._rest)
            self._rest = None
        return _first(fresh, sent), _first(self._block.tensor, sent)

    def _fresh(self, sent: int) -> Tensor:
        try:
            return torch.empty(self.size_bytes, dtype=torch.uint8, device=self.device)
        except Exception as error:
            raise failed("reload", self._owner, sent, error) from error


def _bytes_of(storage: torch.UntypedStorage | None) -> Tensor:
    assert storage is not None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _first(tensor: Tensor, size_bytes: int) -> Tensor:
    return tensor if tensor.nbytes == size_bytes else tensor[:size_bytes]


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


@dataclass(eq=False, slots=True)
class Hosted:
    """A tensor, as a view of its parcel: what autograd and frames hold instead of it."""

    parcel: Parcel
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor, parcel: Parcel) -> Hosted:
        return cls(parcel, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.requires_grad)

    def tensor(self) -> Tensor:
        """Same size, stride, offset, type and bits as the one that was packed. Can be asked for again."""
        empty = torch.empty(0, dtype=self.dtype, device=self.parcel.device)
        return empty.set_(self.parcel.storage(), self.offset, self.size, self.stride)


def on_device(value: Any) -> Any:
    """The same nest with tensors in place of handles."""
    return map_nest(Hosted, lambda hosted: hosted.tensor().requires_grad_(hosted.requires_grad), value)
