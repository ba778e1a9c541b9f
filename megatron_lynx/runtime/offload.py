"""What frames keep can live on the host between a micro-batch's forward and its backward.

    forward of k      [1] saved tensors become handles; a parcel per storage, however many handles look into it
    end of forward    [2] parcels in the order in which they were made, until the plan's bytes are reached: copied out.
                          Their originals are let go when they are copied: at the end of the next forward at the latest
    backward of k-d   [3] begins (d: the prefetch distance): parcels of k are copied back, last one first
    backward of k     [4] a node asks its handle, the handle waits for its parcel, and looks into it as it looked before

What was made first lives longest and is needed last, so it goes. Parcels belong to the handles that autograd's graph and frames
hold: when the graph goes they go, and their host blocks with them (rule R8). Nothing here looks at a clock (rule R1).

A tensor stays where it is if its storage lasts (parameters, buffers), or somebody else holds it anyway: masks and rotary tables,
which come into a half as arguments, what the stage received, and its output.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError
from megatron_lynx.runtime.host_pool import Block, HostPool, too_little
from megatron_lynx.runtime.saved import map_nest, storage_of, tensors_in
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.runtime.transfer import Copier, Copy, Owner, copiers_for, failed
from megatron_lynx.runtime.turns import Place, Turns


@dataclass(frozen=True)
class OffloadPolicy:
    """What the plan says about one chunk, in the runtime's terms."""

    bytes: int
    """Of one micro-batch, how many go to the host."""
    smallest_tensor_bytes: int
    """Smaller storages stay."""
    prefetch: int = 1
    """How many backwards before its own a micro-batch's parcels are fetched."""
    sets: int = 1
    """Micro-batches that are on the host at once."""


class Parcel:
    """One storage of one micro-batch: on the device, or a part of it on the host, or back on the device."""

    def __init__(self, original: Tensor, owner: Owner, back: Copier) -> None:
        self.size_bytes = original.nbytes
        self._device = original.device
        self._original: Tensor | None = original
        self._owner = owner
        self._rest: Tensor | None = None
        self._block: Block | None = None
        self._out: Copy | None = None
        self._back: Copy | None = None
        self._copier = back
        self._returned: Tensor | None = None

    def send(self, block: Block, size_bytes: int, out: Copier) -> None:
        """The first `size_bytes` go to the host; the rest, if any, stays in a tensor of its own."""
        assert self._original is not None
        here, rest = self._original[:size_bytes], self._original[size_bytes:]
        self._rest = rest.clone() if rest.nbytes else None
        self._block = block
        self._out = block.last = out.start(block.tensor[:size_bytes], here, self._owner, (block.last,))

    @property
    def leaving(self) -> bool:
        """Whether it is on its way, and its original still here."""
        return self._out is not None and self._original is not None

    def settle(self, out: Copier) -> None:
        """Let the original go if its copy is over."""
        if self._out is not None and self._out.done:
            out.check(self._out)
            self._let_go()

    def release(self, out: Copier) -> None:
        """Let the original go, behind its copy."""
        if self._out is not None and self._original is not None:
            out.wait(self._out)
            self._let_go()

    def fetch(self) -> None:
        """Start the copy back, if there is one to start."""
        if self._out is None or self._block is None:
            return
        block, self._block = self._block, None
        sent = self.size_bytes - (self._rest.nbytes if self._rest is not None else 0)
        fresh = self._fresh(sent)
        if self._rest is not None:
            fresh[sent:].copy_(self._rest)
            self._rest = None
        self._back = block.last = self._copier.start(fresh[:sent], block.tensor[:sent], self._owner, (self._out,))
        self._returned = fresh

    def bytes_here(self) -> Tensor:
        """The storage on the device, as bytes; what comes behind this comes behind its copy back."""
        if self._out is None:
            assert self._original is not None
            return self._original
        if self._block is not None:
            self.fetch()
        if self._back is not None:
            self._copier.wait(self._back)
            self._back = None
            self._let_go()
        assert self._returned is not None
        return self._returned

    def _let_go(self) -> None:
        """Its copy to the host is over, on the device's timeline too."""
        self._original = None

    def _fresh(self, sent: int) -> Tensor:
        try:
            return torch.empty(self.size_bytes, dtype=torch.uint8, device=self._device)
        except Exception as error:
            raise failed("reload", self._owner, sent, error) from error


@dataclass(frozen=True, eq=False)
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
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        return cls(parcel, tensor.dtype, size, stride, int(tensor.storage_offset()), tensor.requires_grad)

    def tensor(self) -> Tensor:
        """Same size, stride, offset, type and bits as the one that was packed. Can be asked for again."""
        storage = self.parcel.bytes_here().untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


def on_device(value: Any) -> Any:
    """The same nest with tensors in place of handles."""
    return map_nest(Hosted, lambda hosted: hosted.tensor().requires_grad_(hosted.requires_grad), value)


@dataclass(eq=False)
class Shipment:
    """The parcels of one forward of one chunk, in the order in which they were made."""

    owner: Owner
    policy: OffloadPolicy
    pool: HostPool
    device: torch.device
    back: Copier
    lasting: set[int]
    _staying: dict[int, Tensor] = field(default_factory=dict)
    _parcels: dict[int, weakref.ref[Parcel]] = field(default_factory=dict)

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Somebody else holds these until backward."""
        self._staying |= {storage_of(tensor): tensor for tensor in tensors}

    def stow(self, tensor: Tensor) -> Hosted | Tensor:
        """A handle for a tensor that may go to the host, and the tensor itself, without its graph, for one that may not."""
        if not self.may_go(tensor):
            return tensor.detach().requires_grad_(tensor.requires_grad)
        storage = storage_of(tensor)
        known = self._parcels.get(storage)
        parcel = known() if known is not None else None
        if parcel is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            parcel = Parcel(whole, self.owner, self.back)
            self._parcels.pop(storage, None)  # one that died had this address before
            self._parcels[storage] = weakref.ref(parcel)
        return Hosted.of(tensor, parcel)  # [1]

    def stow_all(self, value: Any) -> Any:
        """The same nest with handles in place of tensors that may go."""
        return map_nest(Tensor, lambda tensor: tensor if isinstance(tensor, torch.nn.Parameter) else self.stow(tensor), value)

    def parcels(self) -> Iterator[Parcel]:
        yield from (parcel for known in list(self._parcels.values()) if (parcel := known()) is not None)

    @property
    def full(self) -> bool:
        """Whether more parcels would stay anyway."""
        return sum(parcel.size_bytes for parcel in self.parcels()) >= self.policy.bytes

    def chosen(self, outputs: Any) -> list[tuple[Parcel, int]]:
        """Which parcels go, and how much of each."""
        kept_outputs = {storage_of(tensor) for tensor in tensors_in(outputs)}
        left, chosen = self.policy.bytes, []
        for storage, known in self._parcels.items():
            parcel = known()
            if parcel is None or storage in kept_outputs or left <= 0:
                continue
            chosen.append((parcel, min(left, parcel.size_bytes)))
            left -= parcel.size_bytes
        self._staying.clear()
        return chosen

    def may_go(self, tensor: Tensor) -> bool:
        """Whether a tensor is one that can go: its own, large enough, plain, and held by nobody else."""
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.device != self.device:
            return False
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        storage = storage_of(tensor)
        large = tensor.untyped_storage().nbytes() >= max(1, self.policy.smallest_tensor_bytes)
        return large and storage not in self.lasting and storage not in self._staying


class Offloader:
    """The shipments of one stage: when they leave, and when they are fetched. `policies` by chunk; chunks without one keep all.

    Raises `OffloadError` with both numbers where the host has less than `limit_bytes` for them.
    """

    def __init__(
        self,
        policies: Mapping[int, OffloadPolicy],
        *,
        device: torch.device,
        limit_bytes: int,
        where: str = "stage 0",
        lasting: Callable[[int], Iterable[Tensor]] = lambda chunk: (),
    ) -> None:
        needed_bytes = sum(policy.bytes * policy.sets for policy in policies.values())
        if needed_bytes > limit_bytes:
            raise too_little(where, needed_bytes, limit_bytes)
        self.policies = dict(policies)
        self.trace = Trace(device)
        self.out, self.back = copiers_for(device, self.trace)
        self._where = {chunk: where if len(policies) == 1 else f"{where}, chunk {chunk}" for chunk in policies}
        self._pools = {
            chunk: HostPool(self._where[chunk], device, limit_bytes, policy.sets) for chunk, policy in policies.items()
        }
        self._device = device
        self._lasting = lasting
        self._leaving: list[weakref.ref[Parcel]] = []

    @property
    def host_bytes(self) -> int:
        """Host memory that is held for this stage."""
        return sum(pool.bytes for pool in self._pools.values())

    @property
    def furthest(self) -> int:
        """The largest prefetch distance."""
        return max((policy.prefetch for policy in self.policies.values()), default=0)

    def open(self, micro_batch: int, chunk: int) -> Shipment:
        """A forward of a chunk that has a policy begins."""
        lasting = {storage_of(tensor) for tensor in self._lasting(chunk)}
        owner = Owner(self._where[chunk], micro_batch)
        return Shipment(owner, self.policies[chunk], self._pools[chunk], self._device, self.back, lasting)

    def settle(self) -> None:
        """Let go of originals whose copies are over."""
        for parcel in self._still_leaving():
            parcel.settle(self.out)

    def depart(self, shipment: Shipment, outputs: Any) -> None:
        """Its forward is over. Originals of the shipment before are let go now at the latest: there are never those of three."""
        for parcel in self._still_leaving():
            parcel.release(self.out)
        chosen = shipment.chosen(outputs)
        try:
            blocks = shipment.pool.lend([size for _, size in chosen])
            for (parcel, size), block in zip(chosen, blocks, strict=True):
                parcel.send(block, size, self.out)  # [2]
        except OffloadError:
            raise
        except Exception as error:
            raise failed("offload", shipment.owner, sum(size for _, size in chosen), error) from error
        self._leaving = [weakref.ref(parcel) for parcel, _ in chosen]

    def fetch(self, shipment: Shipment | None) -> None:
        """Its backward comes soon, or now. A second call does nothing."""
        if shipment is not None:
            for parcel in reversed(list(shipment.parcels())):
                parcel.fetch()  # [3]

    def take_bytes(self) -> tuple[int, int]:
        """Bytes that went out, and back, since this was last asked."""
        return self.out.take_bytes(), self.back.take_bytes()

    def take_waited_s(self) -> float:
        """Seconds for which compute waited for copies, either way, since this was last asked."""
        return self.out.take_waited_s() + self.back.take_waited_s()

    def abandon(self) -> None:
        """The step failed."""
        self.out.cancel()
        self.back.cancel()
        self._leaving.clear()

    def close(self) -> None:
        """Nothing is offloaded any more; what is lent goes with its micro-batch."""
        self.out.close()
        self.back.close()
        for pool in self._pools.values():
            pool.clear()

    def _still_leaving(self) -> list[Parcel]:
        parcels = [parcel for known in self._leaving if (parcel := known()) is not None and parcel.leaving]
        self._leaving = [weakref.ref(parcel) for parcel in parcels]
        return parcels


def sets_on_host(turns: Turns, chunk: int, prefetch: int) -> int:
    """How many micro-batches of a chunk are on the host at once, at most, in a step of these turns."""
    away: set[Place] = set()
    most = begun = 0
    for turn in turns.all:
        if turn.kind == "B":
            begun += 1
            away.discard(turn.place)
        if turn.kind == "B" or turns.hidden_by(turn.place) is not None:
            coming = (turns.backward(begun + ahead) for ahead in range(prefetch))
            away.difference_update(one.place for one in coming if one is not None)
        if turn.kind == "F" and turn.chunk == chunk and not turns.at_once(turn.place):
            away.add(turn.place)
            most = max(most, len(away))
    return most
