"""What of one micro-batch's forward through one chunk goes to the host: which storages may, and which do.

A tensor stays where it is if its storage lasts (parameters, buffers), or somebody else holds it anyway: masks and rotary tables,
which come into a half as arguments, what the stage received, and its output.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.nest import map_nest
from megatron_lynx.runtime.offload.copier import Copier, Owner
from megatron_lynx.runtime.offload.host_memory import HostPool
from megatron_lynx.runtime.offload.parcel import Hosted, Parcel
from megatron_lynx.runtime.saved import storage_of, tensors_in


@dataclass(frozen=True)
class OffloadPolicy:
    """What the plan says about one chunk, in the runtime's terms."""

    bytes: int
    """How many bytes of one micro-batch go to the host."""
    smallest_tensor_bytes: int
    """Smaller storages stay."""
    prefetch: int = 1
    """How many backwards before its own a micro-batch's parcels are fetched."""
    sets: int = 1
    """Micro-batches that are on the host at once."""
    ragged: bool = False
    """Whether sizes differ from one micro-batch to the next."""
    avoids_messages: bool = False
    """Whether copies are asked for between the exchanges with other stages only, and exchanges come behind them."""
    pace_bytes: int | None = None
    """How many bytes are copied beside one half's forward, where a micro-batch goes whose own backward follows at once; None: it
    stays."""
    layers: tuple[int, int] = (1, 0)
    """The chunk's first layer, and how many it has."""


@dataclass(eq=False)
class Shipment:
    """The parcels of one forward of one chunk, in the order in which they were made."""

    owner: Owner
    policy: OffloadPolicy
    pool: HostPool
    device: torch.device
    back: Copier
    lasting: set[int]
    half: int = 0
    """The how-manieth half of the forward runs."""
    _staying: dict[int, Tensor] = field(default_factory=dict)
    _parcels: list[tuple[int, weakref.ref[Parcel]]] = field(default_factory=list)
    """With their addresses."""
    _at: dict[int, weakref.ref[Parcel]] = field(default_factory=dict)
    """The newest one at each address: one that was let go, or died, leaves it to another."""
    out: bool = False
    """Whether parcels went to the host that nobody has asked for back yet."""
    _made_bytes: int = 0
    """Of all parcels, those that died included."""

    def leave(self, tensors: Iterable[Tensor]) -> None:
        """Somebody else holds these until backward."""
        self._staying |= {storage_of(tensor): tensor for tensor in tensors}

    def stow(self, tensor: Tensor) -> Hosted | Tensor:
        """A handle for a tensor that may go to the host, and the tensor itself, without its graph, for one that may not."""
        storage = self._going(tensor)
        if storage is None:
            return tensor.detach().requires_grad_(tensor.requires_grad)
        address = storage.data_ptr()
        known = self._at.get(address)
        parcel = known() if known is not None else None
        if parcel is None or not parcel.here:
            parcel = Parcel(tensor, storage, self.owner, self.back, self.half)
            self._at[address] = weakref.ref(parcel)
            self._parcels.append((address, self._at[address]))
            self._made_bytes += parcel.size_bytes
        return Hosted(tensor, parcel)

    def stow_all(self, value: Any) -> Any:
        """The same nest with handles in place of tensors that may go."""
        return map_nest(Tensor, lambda tensor: tensor if isinstance(tensor, torch.nn.Parameter) else self.stow(tensor), value)

    def parcels(self) -> Iterator[Parcel]:
        yield from (parcel for _, known in list(self._parcels) if (parcel := known()) is not None)

    @property
    def full(self) -> bool:
        """Whether more parcels would stay anyway."""
        most_bytes = self.policy.bytes
        return self._made_bytes >= most_bytes and sum(parcel.size_bytes for parcel in self.parcels()) >= most_bytes

    def chosen(self, outputs: Any) -> list[tuple[Parcel, int]]:
        """Which parcels go, and how much of each."""
        kept_outputs = {storage_of(tensor) for tensor in tensors_in(outputs)}
        left, chosen = self.policy.bytes, []
        for storage, known in self._parcels:
            parcel = known()
            if parcel is None or storage in kept_outputs or left <= 0:
                continue
            chosen.append((parcel, min(left, parcel.size_bytes)))
            left -= parcel.size_bytes
        self._staying.clear()
        return chosen

    def take_made(self, outputs: Any) -> list[Parcel]:
        """The parcels that were made since this was last asked. What a half put out is somebody else's, too: the next time."""
        kept_outputs = {storage_of(tensor) for tensor in tensors_in(outputs)}
        made, self._parcels = self._parcels, [each for each in self._parcels if each[0] in kept_outputs]
        return [parcel for storage, known in made if storage not in kept_outputs and (parcel := known()) is not None]

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
        return None if address in self.lasting or address in self._staying else storage
