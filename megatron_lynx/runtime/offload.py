"""What frames keep can live on the host between a micro-batch's forward and its backward.

    forward of k      [1] saved tensors become handles; a parcel per storage, however many handles look into it
    end of forward    [2] parcels in the order in which they were made, until the plan's bytes are reached: copied out.
                          Their originals are let go when they are copied: at the end of the next forward at the latest
    backward of k-d   [3] begins (d: the prefetch distance): parcels of k are copied back, last one first
    backward of k     [4] a node asks its handle, the handle waits for its parcel, and looks into it as it looked before
    exchanges         [5] where copies avoid messages: [2] waits for the pass behind the exchange, the exchange for all copies

What was made first lives longest and is needed last, so it goes. Parcels belong to the handles that autograd's graph and frames
hold: when the graph goes they go, and their host blocks with them (rule R8). Nothing here looks at a clock (rule R1).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lynx.errors import OffloadError
from megatron_lynx.runtime.copiers import copiers_for
from megatron_lynx.runtime.host_memory import HostLimit, too_little
from megatron_lynx.runtime.host_pool import HostPool
from megatron_lynx.runtime.parcel import Parcel
from megatron_lynx.runtime.saved import storage_of
from megatron_lynx.runtime.shipment import OffloadPolicy, Shipment
from megatron_lynx.runtime.stage_order import StageOrder, VirtualMicroBatch
from megatron_lynx.runtime.trace import Trace
from megatron_lynx.runtime.transfer import Owner, failed


class _Departure(NamedTuple):
    """What a forward left to be copied out."""

    shipment: Shipment
    chosen: list[tuple[weakref.ref[Parcel], int]]
    """And how much of each."""


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
        limit = HostLimit(limit_bytes)
        self._pools = {chunk: HostPool(self._where[chunk], device, limit, policy.sets) for chunk, policy in policies.items()}
        self._device = device
        self._lasting = lasting
        self.avoids_messages = any(policy.avoids_messages for policy in policies.values())
        self._leaving: list[weakref.ref[Parcel]] = []
        self._ready: list[_Departure] = []

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
        """Let go of what was copied, where the copies are over."""
        for parcel in self._still_leaving():
            parcel.settle()
        self.out.settle()
        self.back.settle()

    def depart(self, shipment: Shipment, outputs: Any) -> None:
        """Its forward is over. Originals of the shipment before are let go now at the latest: there are never those of three."""
        for parcel in self._still_leaving():
            parcel.release(self.out)
        chosen = [(weakref.ref(parcel), size) for parcel, size in shipment.chosen(outputs)]
        self._ready.append(_Departure(shipment, chosen))
        if not shipment.policy.avoids_messages:
            self.pass_begins()

    def pass_begins(self) -> None:
        """The exchange behind a forward is over: what waited for that leaves now."""
        for shipment, chosen in self._ready:
            self._send(shipment, [(parcel, size) for known, size in chosen if (parcel := known()) is not None])
        self._ready.clear()

    def exchange_begins(self) -> None:
        """Messages between stages come behind the copies asked for so far, where the plan keeps them apart."""
        if self.avoids_messages:
            self.out.give_way()  # [5]
            self.back.give_way()

    def _send(self, shipment: Shipment, chosen: list[tuple[Parcel, int]]) -> None:
        try:
            blocks = shipment.pool.lend([size for _, size in chosen])
            for (parcel, size), block in zip(chosen, blocks, strict=True):
                parcel.send(block, size, self.out)  # [2]
        except OffloadError:
            raise
        except Exception as error:
            raise failed("offload", shipment.owner, sum(size for _, size in chosen), error) from error
        self._leaving += [weakref.ref(parcel) for parcel, _ in chosen]

    def fetch(self, shipment: Shipment | None) -> None:
        """Its backward comes soon, or now. A second call does nothing."""
        if shipment is not None:
            for parcel in reversed(list(shipment.parcels())):
                parcel.fetch()  # [3]

    def take_bytes(self) -> tuple[int, int]:
        """Bytes that went out, and back, since this was last asked."""
        return self.out.take_bytes(), self.back.take_bytes()

    def take_waited_s(self, *, exact: bool = True) -> float:
        """Seconds for which compute waited for copies, either way, since this was last asked; `exact`: see `Copier`."""
        return self.out.take_waited_s(exact=exact) + self.back.take_waited_s(exact=exact)

    def abandon(self) -> None:
        """The step failed."""
        self.out.cancel()
        self.back.cancel()
        self._leaving.clear()
        self._ready.clear()

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


def sets_on_host(order: StageOrder, chunk: int, prefetch: int) -> int:
    """How many micro-batches of a chunk are on the host at once, at most, in a step of this order."""
    away: set[VirtualMicroBatch] = set()
    most = begun = 0
    for each in order.all:
        if each.kind == "B":
            begun += 1
            away.discard(each.virtual)
        if each.kind == "B" or order.hidden_by(each.virtual) is not None:
            coming = (order.backward(begun + ahead) for ahead in range(prefetch))
            away.difference_update(one.virtual for one in coming if one is not None)
        if each.kind == "F" and each.chunk == chunk and not order.at_once(each.virtual):
            away.add(each.virtual)
            most = max(most, len(away))
    return most
