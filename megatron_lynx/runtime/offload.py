"""What moves to the host and back, and when: fixed by bytes and the order of passes (rule R1, docs/offloading.md).

Half by half, a half's storages leave when it ends, in one copy (`pace`). As a whole, a micro-batch is copied out after its
forward, its originals are freed at the end of the next such forward at the latest, and it is copied back when the backward before
its own begins, or its gradient is awaited. If its backward follows its forward, it stays, or moves half by half with a pace.

A tensor stays on the device if it was made after the plan's bytes are reached, if its storage lasts (parameters, buffers), or if
something else references it: masks and rotary tables, which are arguments of a half, and the stage's input and output.

    tensor ──push──> OffloadedTensor: a view of an OffloadedStorage, which autograd and frames store in the tensor's place

    original ──send──> a room on the host ──fetch──> fresh tensor         a part of it, if the plan's bytes end inside it:
        └── freed when that copy is over              └── waited for      the rest stays in its own tensor

Reloads go into fresh tensors: each is freed once backward has passed its node.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.nest import map_nest
from megatron_lynx.pace import AFTERWARDS, Pace, Turns
from megatron_lynx.runtime.device import Copier, Copy, Device, Pair, Trace, copiers_for
from megatron_lynx.runtime.frame import MicroBatch
from megatron_lynx.runtime.host_memory import HostLimit, HostMemory, Lease, bytes_ahead, too_little
from megatron_lynx.runtime.saved import View, is_parameter, is_wrapper, parts_of, storage_of, tensors_in, without_parts


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


@dataclass(frozen=True)
class OffloadPolicy:
    """How one chunk offloads, by the keys of `plan.plan.Offload`."""

    bytes: int
    smallest_tensor_bytes: int
    sets: int = 1
    """Micro-batches on the host at once."""
    ragged: bool = False
    """Whether sizes differ from one micro-batch to the next."""
    avoids_messages: bool = False
    pace_bytes: int | None = None
    all_half_by_half: bool = False
    layers: tuple[int, int] = (1, 0)
    """The chunk's first layer, and its number of layers."""


class Offloader:
    """Offloads one stage. Raises `OffloadError` if `limit` is less than the plan's bytes."""

    def __init__(
        self,
        policies: Mapping[int, OffloadPolicy],
        *,
        device: Device,
        limit: HostLimit,
        where: str = "stage 0",
        lasting: Callable[[int], Iterable[Tensor]] = lambda chunk: (),
    ) -> None:
        needed_bytes = sum(policy.bytes * policy.sets for policy in policies.values())
        if needed_bytes > limit.most_bytes:
            raise too_little(where, needed_bytes, limit)
        self.trace = Trace(device)
        self.copiers = self.out, self.back = copiers_for(device, self.trace)
        self.policies = dict(policies)
        self.device = device
        self.memory = HostMemory(where, device, limit)
        self.locked = 0, 0.0
        """Bytes that `lock_ahead` page-locked, and its seconds."""
        self._avoids_messages = any(policy.avoids_messages for policy in policies.values())
        self._limit = limit
        self._lasting = lasting
        self._lasting_of: dict[int, set[int]] = {}
        """Storages of parameters and buffers, by chunk, until the next step: weights do not move within a step."""
        self._departing: OffloadGroup | None = None
        """The last micro-batch that left as a whole."""

    def lock_ahead(self) -> None:
        """Page-lock the plan's bytes, if the limit has a margin. Raises `OffloadError`."""
        known = [policy for policy in self.policies.values() if policy.sets and not policy.ragged]
        wanted_bytes = sum(policy.sets * bytes_ahead(policy.bytes, policy.smallest_tensor_bytes) for policy in known)
        if known and wanted_bytes <= self._limit.most_bytes:
            begin_s = time.perf_counter()
            self.memory.lock(wanted_bytes)
            self.locked = self._limit.held_bytes, time.perf_counter() - begin_s

    def step_begins(self) -> None:
        self._lasting_of.clear()

    def forward_begins(self, coming: MicroBatch | None) -> None:
        """Begin a forward. `coming`: the micro-batch whose backward follows it, if it is another one."""
        self._send()
        self._fetch(coming)

    def group_for(self, micro_batch: MicroBatch, key: FrameKey, arguments: Any) -> OffloadGroup | None:
        """Return the group for saved tensors of a half that is called with these arguments; None if all of them stay."""
        policy = self.policies.get(micro_batch.chunk)
        if policy is None:
            return None
        group: OffloadGroup | None = micro_batch.group
        if group is None:
            whole = not (policy.all_half_by_half or micro_batch.at_once)
            if not whole and policy.pace_bytes is None:
                return None
            group = micro_batch.group = self.open(micro_batch.number, micro_batch.chunk, whole=whole)
        if group.pace.whole:
            self.settle()
        return group.half_begins(key, arguments)

    def open(self, micro_batch: int, chunk: int, *, whole: bool = True) -> OffloadGroup:
        if chunk not in self._lasting_of:
            self._lasting_of[chunk] = {storage_of(tensor) for tensor in self._lasting(chunk)}
        policy = self.policies[chunk]
        pace = Pace(None if whole else policy.pace_bytes, len(HALVES) * policy.layers[1])
        return OffloadGroup(self, micro_batch, chunk, policy, pace, self._lasting_of[chunk])

    def forward_ends(self, micro_batch: MicroBatch | None, output: Any) -> None:
        if micro_batch is not None and micro_batch.group is not None:
            self.leave(micro_batch.group, output)

    def leave(self, group: OffloadGroup, output: Any) -> None:
        """End a group's forward. As a whole it leaves now, and the group before is freed, so that at most two are resident."""
        group.forward_ends(output)
        if group.pace.whole:
            if self._departing is not None:
                self._departing.release()
            self._departing = group
            if not group.policy.avoids_messages:
                self._send()

    def exchange_begins(self) -> None:
        for copier in self.copiers if self._avoids_messages else ():
            copier.give_way()

    def gradient_awaited(self, coming: MicroBatch | None) -> None:
        """Report that a backward's gradient is in flight: a message, so copies that avoid messages wait for the backward."""
        if not self._avoids_messages:
            self._fetch(coming)

    def backward_begins(self, micro_batch: MicroBatch | None, coming: MicroBatch | None) -> None:
        if self.policies:
            self.settle()
            self._send()
            self._fetch(micro_batch)
            self._fetch(coming)

    def settle(self) -> None:
        if self._departing is not None:
            self._departing.settle()
        for copier in self.copiers:
            copier.settle()

    def _send(self) -> None:
        if self._departing is not None:
            self._departing.send()

    def _fetch(self, micro_batch: MicroBatch | None) -> None:
        if micro_batch is not None and micro_batch.group is not None and micro_batch.group.pace.whole:
            micro_batch.group.fetch()

    def abandon(self) -> None:
        self._departing = None

    def close(self) -> None:
        """Free host memory; rooms in use return when their micro-batch is freed."""
        for copier in self.copiers:
            copier.close()
        self.memory.clear()


_Known = weakref.ref[OffloadedStorage]


class _Leaving(NamedTuple):
    """Storages that leave after one half, with bytes of each. The graph may free them at any time."""

    half: int
    turns: Turns
    storages: list[tuple[_Known, int]]

    def alive(self) -> dict[OffloadedStorage, int]:
        return {storage: size for known, size in self.storages if (storage := known()) is not None}


@dataclass(eq=False)
class OffloadGroup:
    """Storages of one forward of one chunk, in the order in which they were made, and their copies. `lasting`: addresses of
    parameters and buffers."""

    stage: Offloader
    micro_batch: int
    chunk: int
    policy: OffloadPolicy
    pace: Pace
    lasting: set[int]
    half: int = 0
    _staying: dict[int, Tensor] = field(default_factory=dict)
    _storages: list[tuple[int, _Known]] = field(default_factory=list)
    _at: dict[int, _Known] = field(default_factory=dict)
    """The newest storage at each address: freed ones leave it to others."""
    _chosen_bytes: int = 0
    _chosen: list[_Leaving] = field(default_factory=list)
    _leaving: deque[tuple[_Leaving, Copy]] = field(default_factory=deque)
    """Those whose originals may still be resident, with their copies."""
    _away: list[_Leaving] = field(default_factory=list)
    """Those that were not fetched."""

    def half_begins(self, key: FrameKey, arguments: Any) -> OffloadGroup | None:
        """Return the group if saved tensors of this half may leave, else None."""
        self.half = self.place(key)
        if self._chosen_bytes >= self.policy.bytes or self.pace.stays(self.half):
            return None
        input_stays = self.half == 1 and not self.pace.whole  # Megatron holds the chunk's input until its forward is over
        for index, tensor in enumerate(tensors_in(arguments)):
            if index > 0 or tensor.is_leaf or input_stays:  # masks and tables, which layers share; the stage's input
                self.leave([tensor])
        return self

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Keep these on the device: something else holds them until backward."""
        self._staying |= {storage_of(tensor): tensor for tensor in tensors}

    def push(self, tensor: Tensor) -> OffloadedTensor | OffloadedWrapper | Tensor:
        """Return an `OffloadedTensor` (for a wrapper, an `OffloadedWrapper`), or the detached tensor if it must stay."""
        if type(tensor) is not Tensor and is_wrapper(tensor) and self.may_go(tensor):
            return OffloadedWrapper(tensor, {name: self.push(part) for name, part in parts_of(tensor).items()})
        storage = self._movable_storage(tensor)
        if storage is None:
            return tensor.detach().requires_grad_(tensor.requires_grad)
        address = storage.data_ptr()
        known = self._at.get(address)
        offloaded = known() if known is not None else None
        if offloaded is None or not offloaded.here:
            offloaded = OffloadedStorage(tensor, storage, self.micro_batch, self.stage.back)
            self._at[address] = weakref.ref(offloaded)
            self._storages.append((address, self._at[address]))
        return OffloadedTensor(tensor, offloaded)

    def push_all(self, value: Any) -> Any:
        return map_nest(Tensor, lambda tensor: tensor if is_parameter(tensor) else self.push(tensor), value)

    def may_go(self, tensor: Tensor, *, any_size: bool = False) -> bool:
        """Return whether a tensor may leave: plain, large enough (or of `any_size`), and not held by others."""
        parts = parts_of(tensor).values() if is_wrapper(tensor) else [tensor]
        return any(self._movable_storage(part, any_size=any_size) is not None for part in parts)

    def _movable_storage(self, tensor: Tensor, *, any_size: bool = False) -> torch.UntypedStorage | None:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self.stage.device.where:
            return None
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        if storage.nbytes() < (self.policy.smallest_tensor_bytes or 1) and not any_size:
            return None
        address = storage.data_ptr()
        held = self._staying.get(address)
        stays = held is not None and storage_of(held) == address  # Megatron may have freed this input already
        return None if stays or address in self.lasting else storage

    def half_ends(self, key: FrameKey, outputs: Any, ahead: int) -> None:
        """End a half's forward. `ahead`: how many halves before its own backward its recomputation may begin."""
        self.half = self.place(key)
        self.release(self.half)
        if not self.pace.stays(self.half):
            self._choose(outputs, ahead)
        if not self.pace.whole:
            self.send()

    def forward_ends(self, output: Any) -> None:
        """End the forward: others no longer hold their tensors."""
        self._staying.clear()
        if self.pace.whole:
            self.half += 1  # outputs of code after the last half
            self._choose(output)
        else:
            self.release(self.pace.halves)

    def send(self) -> None:
        """Copy the chosen storages to the host, one copy per half. Raises `OffloadError` if the host has too little memory."""
        chosen, self._chosen = self._chosen, []
        for leaving in chosen:
            if storages := leaving.alive():
                lease = self.stage.memory.lend((self.chunk, leaving.half), [*storages.values()])
                pairs = [storage._copy_to_host(lease, at, size) for at, (storage, size) in enumerate(storages.items())]
                copy = lease.room.last = self.stage.out.start(pairs, self.micro_batch, [lease.room.last])
                for storage in storages:
                    storage._out = copy
                self._leaving.append((leaving, copy))
                self._away.append(leaving)

    def settle(self) -> None:
        while self._leaving and self._leaving[0][1].done:
            self._release(*self._leaving.popleft())

    def release(self, place: int = AFTERWARDS) -> None:
        """Free originals that are away after the half at `place`, after their copies."""
        while self._leaving and self._leaving[0][0].turns.away <= place:
            self._release(*self._leaving.popleft())

    def fetch(self, place: int = 1) -> None:
        """Copy back the storages that are due when backward reaches the half at `place`, the last ones first."""
        while self._away and self._away[-1].turns.back >= place:
            fetch(self._away.pop().alive())

    def backward_reaches(self, key: FrameKey) -> None:
        self.fetch(self.place(key))

    def place(self, key: FrameKey) -> int:
        layer, half = key
        return len(HALVES) * (layer - self.policy.layers[0]) + HALVES.index(half) + 1

    def _choose(self, outputs: Any, ahead: int = 1) -> None:
        """Choose storages made since the last call to leave next, up to the plan's bytes; `outputs` wait for the next call."""
        kept_outputs = {storage_of(tensor) for tensor in tensors_in(outputs)}
        made, self._storages = self._storages, [entry for entry in self._storages if entry[0] in kept_outputs]
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
            self.stage.out.wait(copy)
            for storage in storages:
                storage._let_go()
