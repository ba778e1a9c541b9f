"""The activations of one micro-batch that may wait in host memory: its offload group, which is its storages, wherever they are.

    tensor ──push──> OffloadedTensor: a view of an OffloadedStorage, which autograd and frames hold instead of the tensor

    original ──send──> block on the host ──fetch──> fresh tensor          a part of it, if the plan's bytes end inside it:
        └── freed when that copy is over              └── waited for      the rest stays in a tensor of its own

Half by half, the copies lie within the micro-batch's own forward and backward:

    forward     ├─ 1 ─┤├─ 2 ─┤├─ 3 ─┤ ... ├─ n ─┤      backward   ├─ n ─┤ ... ├─ 3 ─┤├─ 2 ─┤├─ 1 ─┤
    to host           └[1] 1 ────────[2]  [4]          back                   └[3] 1 ─────────┘[5]

 [1] a half is over: its saved tensors leave until the plan's bytes are reached; its outputs leave with the next half, if at all
 [2] the half after which it is away by its pace (`pace`) is over: compute waits for its copy, and the originals are freed
 [3] backward reaches that half, or one a little before, for a recomputation ahead of time: the copy back begins
 [4] the last half stays, and so do storages made after the plan's bytes are reached: they are needed first
 [5] a node asks its handle

As a whole, all leaves after the forward, and `Offloader` says when it is away and when it comes back.

What leaves after one half is one copy with one wait. A tensor stays where it is if its storage lasts (parameters, buffers), or if
something else holds it anyway: masks and rotary tables, which come into a half as arguments, the stage's input and its output.

Reloads go into fresh tensors of exactly the original's size: each is freed as soon as backward has passed its node. Two buffers
that are filled in turns would hold two micro-batches' bytes all the time (`benchmarks/reload_targets.py`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.nest import map_nest
from megatron_lynx.pace import AFTERWARDS, Pace, Turns
from megatron_lynx.runtime.offload.copier import Copier, Copy, Owner, Pair, naming
from megatron_lynx.runtime.offload.host_memory import Block, HostMemory
from megatron_lynx.runtime.saved import storage_of, tensors_in


@dataclass(frozen=True)
class OffloadPolicy:
    """How one chunk offloads, from the plan."""

    bytes: int
    """Bytes of one micro-batch that go to the host."""
    smallest_tensor_bytes: int
    """Smaller storages stay."""
    prefetch: int = 1
    """How many backwards before its own a whole micro-batch is fetched."""
    sets: int = 1
    """Micro-batches that are on the host at once."""
    ragged: bool = False
    """Whether sizes differ from one micro-batch to the next."""
    avoids_messages: bool = False
    """Whether copies are issued between the exchanges with other stages only, and exchanges wait for them."""
    pace_bytes: int | None = None
    """Bytes that are copied beside one half's forward, where a micro-batch moves half by half; None: none does, and one whose own
    backward follows at once stays."""
    all_half_by_half: bool = False
    """Whether every micro-batch moves half by half, and not only one whose own backward follows at once."""
    layers: tuple[int, int] = (1, 0)
    """The chunk's first layer, and how many it has."""

    def pace(self, *, whole: bool) -> Pace:
        return Pace(None if whole else self.pace_bytes, len(HALVES) * self.layers[1])


class OffloadedStorage:
    """One storage of one micro-batch: on the device, or a part of it on the host, or back on the device.

    If the tensor it was made for is all of it, as most are, it is copied, and one like it comes back; otherwise its bytes.
    """

    def __init__(self, saved: Tensor, storage: torch.UntypedStorage, owner: Owner, back: Copier) -> None:
        """`saved`: a tensor in this storage, the first one that was pushed."""
        self.size_bytes = storage.nbytes()
        self.whole = saved.nbytes == self.size_bytes and saved.is_contiguous()
        """Whether that tensor is all of it."""
        self.device = storage.device
        self._original: Tensor | None = saved.detach() if self.whole else _bytes_of(storage)
        self._dtype, self._shape = self._original.dtype, self._original.shape
        self._owner = owner
        self._rest: Tensor | None = None
        self._block: Block | None = None
        self._hosted: Tensor | None = None
        """The part of the block that it fills."""
        self._out: Copy | None = None
        self._back: Copy | None = None
        self._copier = back
        self._returned: Tensor | None = None

    def is_all_of(self, tensor: Tensor) -> bool:
        """Whether this tensor in its storage is the one it was made for."""
        return self.whole and tensor.dtype is self._dtype and tensor.shape == self._shape and tensor.is_contiguous()

    @property
    def here(self) -> bool:
        """Whether its original is still on the device."""
        return self._original is not None

    def tensor(self) -> Tensor:
        """The tensor that it was made for, or its bytes, on the device. Compute that follows waits for its copy back."""
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
        target = self._returned = self._fresh()
        if self._rest is not None:
            all_bytes = _bytes_of(target.untyped_storage())
            target = all_bytes[: hosted.nbytes]
            all_bytes[hosted.nbytes :].copy_(self._rest)
            self._rest = None
        return target, hosted

    def _fresh(self) -> Tensor:
        return torch.empty(self._shape, dtype=self._dtype, device=self.device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class OffloadedTensor:
    """A tensor that is an offloaded storage, or a view of it. Autograd and frames hold it instead of the tensor."""

    __slots__ = ("requires_grad", "storage", "view")

    def __init__(self, tensor: Tensor, storage: OffloadedStorage) -> None:
        self.storage = storage
        self.requires_grad = tensor.requires_grad
        self.view = None if storage.is_all_of(tensor) else _View.of(tensor)

    def tensor(self) -> Tensor:
        """Same size, stride, offset, type and bits as the one that was pushed. Can be asked for again."""
        there, view = self.storage.tensor(), self.view
        if view is None:
            return there
        empty = torch.empty(0, dtype=view.dtype, device=there.device)
        return empty.set_(there.untyped_storage(), view.offset, view.size, view.stride)


class _View(NamedTuple):
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        return cls(tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def on_device(value: Any) -> Any:
    """The same nest with tensors in place of those that were offloaded."""
    return map_nest(OffloadedTensor, lambda one: one.tensor().detach().requires_grad_(one.requires_grad), value)


_Known = weakref.ref[OffloadedStorage]


class _Leaving(NamedTuple):
    """Storages that leave after one half, with bytes of each. The graph may drop them at any time."""

    half: int
    turns: Turns
    storages: list[tuple[_Known, int]]

    def alive(self) -> dict[OffloadedStorage, int]:
        return {storage: size for known, size in self.storages if (storage := known()) is not None}


@dataclass(eq=False)
class OffloadGroup:
    """The storages of one forward of one chunk, in the order in which they were made, and their copies."""

    owner: Owner
    policy: OffloadPolicy
    pace: Pace
    memory: HostMemory
    device: torch.device
    out: Copier
    back: Copier
    lasting: set[int]
    half: int = 0
    """Index, from 1, of the half whose forward came last."""
    _staying: dict[int, Tensor] = field(default_factory=dict)
    _storages: list[tuple[int, _Known]] = field(default_factory=list)
    """Those that may still leave, with their addresses."""
    _at: dict[int, _Known] = field(default_factory=dict)
    """The newest one at each address: one that was freed leaves it to another."""
    _chosen_bytes: int = 0
    _chosen: list[_Leaving] = field(default_factory=list)
    """Those that leave next."""
    _leaving: deque[tuple[_Leaving, Copy]] = field(default_factory=deque)
    """Those whose originals may still be here, and their copies."""
    _away: list[_Leaving] = field(default_factory=list)
    """Those that were not fetched."""

    # --- recording -----------------------------------------------------------------------------------------------------

    def half_begins(self, key: FrameKey, arguments: Any) -> OffloadGroup | None:
        """Where the saved tensors of this half go; None where all of them stay."""
        self.half = self._place(key)
        if self._chosen_bytes >= self.policy.bytes or self.pace.stays(self.half):
            return None
        input_stays = self.half == 1 and not self.pace.whole  # Megatron holds the chunk's input until its forward is over
        for index, tensor in enumerate(tensors_in(arguments)):
            if index > 0 or tensor.is_leaf or input_stays:  # masks and tables, which layers share; what the stage received
                self.leave([tensor])
        return self

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Something else holds these until backward."""
        self._staying |= {storage_of(tensor): tensor for tensor in tensors}

    def push(self, tensor: Tensor) -> OffloadedTensor | Tensor:
        """A handle to hold instead of a tensor that may go to the host; the tensor itself, without its graph, if it may not."""
        storage = self._going(tensor)
        if storage is None:
            return tensor.detach().requires_grad_(tensor.requires_grad)
        address = storage.data_ptr()
        known = self._at.get(address)
        offloaded = known() if known is not None else None
        if offloaded is None or not offloaded.here:
            offloaded = OffloadedStorage(tensor, storage, self.owner, self.back)
            self._at[address] = weakref.ref(offloaded)
            self._storages.append((address, self._at[address]))
        return OffloadedTensor(tensor, offloaded)

    def push_all(self, value: Any) -> Any:
        """The same nest with `OffloadedTensor`s in place of tensors that may go."""
        return map_nest(Tensor, lambda tensor: tensor if isinstance(tensor, torch.nn.Parameter) else self.push(tensor), value)

    def may_go(self, tensor: Tensor, *, any_size: bool = False) -> bool:
        """Whether a tensor can go: its own, large enough (or of `any_size`), plain, and held by nothing else."""
        return self._going(tensor, any_size=any_size) is not None

    def _going(self, tensor: Tensor, *, any_size: bool = False) -> torch.UntypedStorage | None:
        """The storage of a tensor that may go."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self.device:
            return None
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < (self.policy.smallest_tensor_bytes or 1) and not any_size:
            return None
        address = storage.data_ptr()
        held = self._staying.get(address)
        stays = held is not None and storage_of(held) == address  # Megatron may have freed a node's input since
        return None if stays or address in self.lasting else storage

    # --- copies --------------------------------------------------------------------------------------------------------

    def half_ends(self, key: FrameKey, outputs: Any, ahead: int) -> None:
        """A half's forward is over. `ahead`: how many halves before its own backward a recomputation of it may begin."""
        self.half = self._place(key)
        self.release(self.half)
        if not self.pace.stays(self.half):
            self._choose(outputs, ahead)
        if not self.pace.whole:
            self.send()  # [1]

    def forward_ends(self, output: Any) -> None:
        """The forward is over, and with it what others hold until then."""
        self._staying.clear()
        if self.pace.whole:
            self.half += 1  # the last half's outputs, if code after it has others
            self._choose(output)
        else:
            self.release(self.pace.halves)

    def send(self) -> None:
        """Copy the storages that were chosen to the host, those of one half at once. Raises `OffloadError`."""
        chosen, self._chosen = self._chosen, []
        for each in chosen:
            if storages := each.alive():
                sizes = [*storages.values()]
                with naming("offload", self.owner, sum(sizes)):
                    blocks = self.memory.lend((self.owner.where, each.half), sizes, changing=self.policy.ragged)
                    pairs = [storage._going(block, size) for (storage, size), block in zip(storages.items(), blocks, strict=True)]
                copy = self.out.start(pairs, self.owner, [block.last for block in blocks])
                for storage, block in zip(storages, blocks, strict=True):
                    storage._out = block.last = copy
                self._leaving.append((each, copy))
                self._away.append(each)

    def settle(self) -> None:
        """Free originals whose copies are over."""
        while self._leaving and self._leaving[0][1].done:
            self._release(*self._leaving.popleft())

    def release(self, place: int = AFTERWARDS) -> None:
        """Free originals that are away when the half at `place` is over, after their copies."""
        while self._leaving and self._leaving[0][0].turns.away <= place:
            self._release(*self._leaving.popleft())  # [2]

    def fetch(self, place: int = 1) -> None:
        """Copy back the storages whose turn it is when backward reaches the half at `place`, the last one first."""
        while self._away and self._away[-1].turns.back >= place:
            fetch(self._away.pop().alive())  # [3]

    def backward_reaches(self, key: FrameKey) -> None:
        """A half's backward begins."""
        self.fetch(self._place(key))

    def _place(self, key: FrameKey) -> int:
        """Index, from 1, of a half in its chunk."""
        layer, half = key
        return len(HALVES) * (layer - self.policy.layers[0]) + HALVES.index(half) + 1

    def _choose(self, outputs: Any, ahead: int = 1) -> None:
        """Storages made since the last call leave next, until the plan's bytes are reached; those of `outputs` stay for the next
        call."""
        kept_outputs = {storage_of(tensor) for tensor in tensors_in(outputs)}
        made, self._storages = self._storages, [each for each in self._storages if each[0] in kept_outputs]
        before_bytes, chosen = self._chosen_bytes, list[tuple[_Known, int]]()
        for address, known in made:
            storage = None if address in kept_outputs else known()
            left_bytes = self.policy.bytes - self._chosen_bytes
            if storage is not None and left_bytes > 0 and storage.size_bytes:
                chosen.append((known, min(left_bytes, storage.size_bytes)))
                self._chosen_bytes += chosen[-1][1]
        if chosen:
            turns = self.pace.leaves(self.half, self._chosen_bytes - before_bytes, ahead)
            self._chosen.append(_Leaving(self.half, turns, chosen))

    def _release(self, leaving: _Leaving, copy: Copy) -> None:
        if storages := leaving.alive():
            self.out.wait(copy)
            for storage in storages:
                storage._let_go()


def fetch(storages: Iterable[OffloadedStorage]) -> None:
    """Start one copy back of those storages that are on the host, the last one first."""
    coming = [storage for storage in reversed(list(storages)) if storage._block is not None]
    if not coming:
        return
    copier, owner = coming[0]._copier, coming[0]._owner
    with naming("reload", owner, sum(storage.size_bytes for storage in coming)):
        pairs = [storage._coming() for storage in coming]
    back = copier.start(pairs, owner, [storage._out for storage in coming])
    for storage in coming:
        assert storage._block is not None
        storage._back = storage._block.last = back
        storage._block = None
