"""What one micro-batch keeps that may wait in host memory: its offload group, which is its storages, wherever their bytes are.

    tensor ──push──> OffloadedTensor: a view of an OffloadedStorage, which autograd and frames hold instead of the tensor

    original ──send──> block on the host ──fetch──> fresh tensor          a part of it, if the plan's bytes end inside it:
        └── let go when that copy is over             └── waited for      the rest stays in a tensor of its own

Storages of one half go together and come back together: one copy, one wait. A tensor stays where it is if its storage lasts
(parameters, buffers), or somebody else holds it anyway: masks and rotary tables, which come into a half as arguments, what the
stage received, and its output.

Reloads go into fresh tensors of exactly the original's size: each is freed as soon as backward has passed its node. Two buffers
that are filled in turns would hold two micro-batches' bytes all the time (`benchmarks/reload_targets.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.offload.copier import Copier, Copy, Owner, Pair, naming
from megatron_lynx.runtime.offload.host_memory import Block, HostPool
from megatron_lynx.runtime.saved import storage_of, tensors_in


@dataclass(frozen=True)
class OffloadPolicy:
    """What the plan says about one chunk, in the runtime's terms."""

    bytes: int
    """How many bytes of one micro-batch go to the host."""
    smallest_tensor_bytes: int
    """Smaller storages stay."""
    prefetch: int = 1
    """How many backwards before its own a micro-batch's group is fetched."""
    sets: int = 1
    """Micro-batches that are on the host at once."""
    ragged: bool = False
    """Whether sizes differ from one micro-batch to the next."""
    avoids_messages: bool = False
    """Whether copies are asked for between the exchanges with other stages only, and exchanges come behind them."""
    pace_bytes: int | None = None
    """How many bytes are copied beside one half's forward, where a micro-batch goes half by half; None: none does, and one whose
    own backward follows at once stays."""
    all_half_by_half: bool = False
    """Whether every micro-batch goes so, and not only one whose own backward follows at once."""
    paced_sets: int = 0
    """Micro-batches that go so and are on the host at once: all in flight, or one, or two where the next one's forward runs in
    turns with its backward."""
    layers: tuple[int, int] = (1, 0)
    """The chunk's first layer, and how many it has."""


class OffloadedStorage:
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
        """The part of the block that it fills."""
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

    @property
    def hosted_bytes(self) -> int:
        return 0 if self._hosted is None else self._hosted.nbytes

    def settle(self) -> None:
        """Let the original go if its copy is over."""
        if self._out is not None and self._original is not None and self._out.done:
            self._let_go()

    def release(self, out: Copier) -> None:
        """Let the original go, behind its copy."""
        if self._out is not None and self._original is not None:
            out.wait(self._out)
            self._let_go()

    def tensor(self) -> Tensor:
        """The tensor that it was made for, or its bytes, on the device. Compute that follows comes behind its copy back."""
        if self._out is None:
            assert self._original is not None
            return self._original
        if self.on_host:
            fetch([self])
        if self._back is not None:
            self._copier.wait(self._back)
            self._back = None
            if self._original is not None:
                self._let_go()
        assert self._returned is not None
        return self._returned

    def _let_go(self) -> None:
        """Its copy to the host is over, on the device's timeline too."""
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
    """A tensor that is an offloaded storage, or a view of it: what autograd and frames hold instead of it."""

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


@dataclass(eq=False)
class OffloadGroup:
    """The storages of one forward of one chunk, in the order in which they were made."""

    owner: Owner
    policy: OffloadPolicy
    pool: HostPool
    device: torch.device
    back: Copier
    lasting: set[int]
    half: int = 0
    """The how-manieth half of the forward runs."""
    out: bool = False
    """Whether storages went to the host that nobody has asked for back yet."""
    _staying: dict[int, Tensor] = field(default_factory=dict)
    _storages: list[tuple[int, weakref.ref[OffloadedStorage]]] = field(default_factory=list)
    """All that were made, with their addresses."""
    _at: dict[int, weakref.ref[OffloadedStorage]] = field(default_factory=dict)
    """The newest one at each address: one that was let go, or died, leaves it to another."""
    _made_bytes: int = 0
    """Bytes of all that were made, those that died included."""

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Somebody else holds these until backward."""
        self._staying |= {storage_of(tensor): tensor for tensor in tensors}

    def push(self, tensor: Tensor) -> OffloadedTensor | Tensor:
        """What to hold instead of a tensor that may go to the host, and the tensor itself, without its graph, for one that may
        not."""
        storage = self._going(tensor)
        if storage is None:
            return tensor.detach().requires_grad_(tensor.requires_grad)
        address = storage.data_ptr()
        known = self._at.get(address)
        offloaded = known() if known is not None else None
        if offloaded is None or not offloaded.here:
            offloaded = OffloadedStorage(tensor, storage, self.owner, self.back, self.half)
            self._at[address] = weakref.ref(offloaded)
            self._storages.append((address, self._at[address]))
            self._made_bytes += offloaded.size_bytes
        return OffloadedTensor(tensor, offloaded)

    def push_all(self, value: Any) -> Any:
        """The same nest with `OffloadedTensor`s in place of tensors that may go."""
        return map_nest(Tensor, lambda tensor: tensor if isinstance(tensor, torch.nn.Parameter) else self.push(tensor), value)

    def storages(self) -> Iterator[OffloadedStorage]:
        """The storages that live."""
        yield from (storage for _, known in list(self._storages) if (storage := known()) is not None)

    @property
    def full(self) -> bool:
        """Whether more storages would stay anyway."""
        most_bytes = self.policy.bytes
        return self._made_bytes >= most_bytes and sum(storage.size_bytes for storage in self.storages()) >= most_bytes

    def chosen(self, outputs: Any) -> list[tuple[OffloadedStorage, int]]:
        """Which storages go, and how many bytes of each."""
        kept_outputs = {storage_of(tensor) for tensor in tensors_in(outputs)}
        self._staying.clear()
        return within(
            self.policy.bytes,
            (storage for at, known in self._storages if at not in kept_outputs and (storage := known()) is not None),
        )

    def take_made(self, outputs: Any) -> list[OffloadedStorage]:
        """The storages that were made since this was last asked. What a half put out is somebody else's, too: the next time."""
        kept_outputs = {storage_of(tensor) for tensor in tensors_in(outputs)}
        made, self._storages = self._storages, [each for each in self._storages if each[0] in kept_outputs]
        return [storage for at, known in made if at not in kept_outputs and (storage := known()) is not None]

    def forward_is_over(self) -> None:
        """What others hold until backward is theirs from now on."""
        self._staying.clear()

    def may_go(self, tensor: Tensor, *, any_size: bool = False) -> bool:
        """Whether a tensor is one that can go: its own, large enough (or of `any_size`), plain, and held by nobody else."""
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
        stays = held is not None and storage_of(held) == address  # what a node was given Megatron may have let go since
        return None if stays or address in self.lasting else storage


class Sent(NamedTuple):
    """One copy to the host, and the storages that it is of; their graph may let them die before it is over."""

    copy: Copy
    storages: list[weakref.ref[OffloadedStorage]]

    def alive(self) -> list[OffloadedStorage]:
        return [storage for known in self.storages if (storage := known()) is not None]


def within(most_bytes: int, storages: Iterable[OffloadedStorage]) -> list[tuple[OffloadedStorage, int]]:
    """How many bytes of each may go until so many are reached."""
    chosen = []
    for storage in storages:
        if most_bytes <= 0:
            break
        chosen.append((storage, min(most_bytes, storage.size_bytes)))
        most_bytes -= storage.size_bytes
    return chosen


def send(group: OffloadGroup, chosen: Sequence[tuple[OffloadedStorage, int]], pool: HostPool, out: Copier) -> list[Sent]:
    """Copy so many bytes of each storage to the host, those of one half all at once. Raises `OffloadError`."""
    sizes = [size for _, size in chosen]
    with naming("offload", group.owner, sum(sizes)):
        departing = [(*one, block) for one, block in zip(chosen, pool.lend(sizes), strict=True)]
        return [_send_half(list(of_half), group.owner, out) for _, of_half in groupby(departing, key=lambda one: one[0].half)]


def _send_half(departing: Sequence[tuple[OffloadedStorage, int, Block]], owner: Owner, out: Copier) -> Sent:
    pairs = [storage._going(block, size_bytes) for storage, size_bytes, block in departing]
    copy = out.start(pairs, owner, [block.last for _, _, block in departing])
    for storage, _, block in departing:
        storage._out = block.last = copy
    return Sent(copy, [weakref.ref(storage) for storage, _, _ in departing])


def fetch(storages: Iterable[OffloadedStorage]) -> None:
    """Copy back what of these is on the host, the last one first, those of one half all at once."""
    on_host = [storage for storage in reversed(list(storages)) if storage.on_host]
    for _, of_half in groupby(on_host, key=lambda storage: storage.half):
        _fetch_half(list(of_half))


def _fetch_half(storages: Sequence[OffloadedStorage]) -> None:
    copier, owner = storages[0]._copier, storages[0]._owner
    with naming("reload", owner, sum(storage.hosted_bytes for storage in storages)):
        pairs = [storage._coming() for storage in storages]
    back = copier.start(pairs, owner, [storage._out for storage in storages])
    for storage in storages:
        assert storage._block is not None
        storage._back = storage._block.last = back
        storage._block = None
