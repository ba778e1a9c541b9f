"""When what a stage keeps goes to the host and comes back: fixed by the order of passes, which the engine reports (rule R1).

    forward of k      [1] saved tensors are pushed to the micro-batch's group, which holds each storage once
    end of forward    [2] storages in the order in which they were made, until the plan's bytes are reached: copied out, those
                          of one half at once.
                          Their originals are let go when they are copied: at the end of the next forward at the latest
    backward of k-d   [3] begins (d: the prefetch distance), or the gradient for it is awaited, or the forward right before it
                          begins: storages of k are copied back, last one first
    backward of k     [4] a node asks for its tensor, waits for its storage, and looks into it as it looked before
    exchanges         [5] where copies avoid messages: [2] waits for the pass behind the exchange, the exchange for all copies
    own backward      [6] follows at once: it stays on the device, or with a pace it goes and comes half by half (`half_by_half`);
                          all micro-batches do that where the plan says so

What was made first lives longest and is needed last, so it goes. Storages belong to the handles that autograd's graph and frames
hold: when the graph goes they go, and their host blocks with them (rule R8).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.errors import OffloadError
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.frame import MicroBatch
from megatron_lynx.runtime.ledger import Ledger
from megatron_lynx.runtime.offload.copier import Owner, copiers_for
from megatron_lynx.runtime.offload.group import OffloadedStorage, OffloadGroup, OffloadPolicy, Sent, fetch, send
from megatron_lynx.runtime.offload.half_by_half import HalfByHalf
from megatron_lynx.runtime.offload.host_memory import HostLimit, HostPool, Slab, bytes_ahead, too_little
from megatron_lynx.runtime.saved import storage_of, tensors_in
from megatron_lynx.runtime.trace import Trace


class _Departure(NamedTuple):
    """What a forward left to be copied out."""

    group: OffloadGroup
    chosen: list[tuple[weakref.ref[OffloadedStorage], int]]
    """Which storages, and how many bytes of each."""


class Locked(NamedTuple):
    """Host memory that was page-locked before the first step, and how long that took."""

    bytes: int
    seconds: float


class Offloader:
    """The offload groups of one stage. `policies` by chunk: a chunk without one keeps all on the device.

    Raises `OffloadError` with both numbers where the host has less than `limit` for them.
    """

    def __init__(
        self,
        policies: Mapping[int, OffloadPolicy],
        *,
        device: Device,
        limit: HostLimit,
        where: str = "stage 0",
        lasting: Callable[[int], Iterable[Tensor]] = lambda chunk: (),
    ) -> None:
        needed_bytes = sum(policy.bytes * (policy.sets + policy.paced_sets) for policy in policies.values())
        if needed_bytes > limit.most_bytes:
            raise too_little(where, needed_bytes, limit)
        self.trace = Trace(device)
        self.out, self.back = copiers_for(device, self.trace)
        self._policies = dict(policies)
        self._furthest = max((policy.prefetch for policy in policies.values()), default=0)
        self._avoids_messages = any(policy.avoids_messages for policy in policies.values())
        self._where = {chunk: where if len(policies) == 1 else f"{where}, chunk {chunk}" for chunk in policies}
        self._limit = limit
        self._ahead: dict[tuple[int, bool], list[Slab]] = {}
        """Memory that was locked before the first step, by chunk and by whether it is for what goes half by half."""
        self.locked = Locked(0, 0.0)
        self._pools: dict[tuple[int, int], HostPool] = {}
        """Host memory by chunk and half; half 0 is for micro-batches that go whole."""
        self._device = device
        self._lasting = lasting
        self._lasting_of: dict[int, set[int]] = {}
        """Storages of parameters and buffers, by chunk, until the next step: nobody puts other weights in place in between."""
        self._groups: weakref.WeakKeyDictionary[MicroBatch, OffloadGroup] = weakref.WeakKeyDictionary()
        self._half_by_half: weakref.WeakKeyDictionary[MicroBatch, HalfByHalf] = weakref.WeakKeyDictionary()
        self._leaving: deque[Sent] = deque()
        """Copies whose originals may still be here."""
        self._ready: list[_Departure] = []

    @property
    def chunks(self) -> Container[int]:
        """The chunks of which anything goes to the host."""
        return self._policies

    def lock_ahead(self) -> None:
        """Page-lock what the plan says will be needed, before the first step. What experts keep is not known before, and nothing
        is locked where the host has no room for a little more than the plan's bytes.

        Raises `OffloadError` where the host does not give it.
        """
        wanted = {
            (chunk, paced): (sets, bytes_ahead(policy.bytes, policy.smallest_tensor_bytes))
            for chunk, policy in self._policies.items()
            for paced, sets in ((False, policy.sets), (True, policy.paced_sets))
            if sets and not policy.ragged
        }
        if sum(sets * size for sets, size in wanted.values()) > self._limit.most_bytes:
            return
        begin_s = time.perf_counter()
        try:
            for (chunk, paced), (sets, size) in wanted.items():
                self._ahead[chunk, paced] = [Slab(self._where[chunk], size, self._device, self._limit) for _ in range(sets)]
        except OffloadError:
            self._ahead.clear()
            raise
        self.locked = Locked(self._limit.held_bytes, time.perf_counter() - begin_s)

    # --- what the engine reports ---------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Weights may lie elsewhere than in the step before."""
        self._lasting_of.clear()

    def forward_begins(self, ledger: Ledger) -> None:
        self.pass_begins()
        if ledger.hidden_by_forward() is not None:
            self._fetch_coming(ledger)

    def forward_ends(self, micro_batch: MicroBatch | None, output: Any) -> None:
        if micro_batch is not None and micro_batch in self._groups:
            self.depart(self._groups[micro_batch], output)
        elif micro_batch is not None and micro_batch in self._half_by_half:
            self._half_by_half[micro_batch].forward_ends()

    def half_ends(self, micro_batch: MicroBatch, key: FrameKey, outputs: Any, ahead: int) -> None:
        """A half's forward is over; a replay of it may begin so many halves before its own backward."""
        if (going := self._half_by_half.get(micro_batch)) is not None:
            going.half_ends(key, outputs, ahead)

    def backward_reaches(self, micro_batch: MicroBatch, key: FrameKey) -> None:
        """A half's backward begins."""
        if (coming := self._half_by_half.get(micro_batch)) is not None:
            coming.backward_reaches(key)

    def exchange_begins(self) -> None:
        """Messages between stages come behind the copies asked for so far, where the plan keeps them apart."""
        if self._avoids_messages:
            self.out.give_way()  # [5]
            self.back.give_way()

    def gradient_awaited(self, ledger: Ledger) -> None:
        """A backward's gradient is on its way. That is a message: copies that avoid those wait for the backward."""
        if not self._avoids_messages:
            self._fetch_coming(ledger)

    def backward_begins(self, micro_batch: MicroBatch | None, ledger: Ledger) -> None:
        self.settle()
        self.pass_begins()
        if micro_batch is not None:
            self.fetch(self._groups.get(micro_batch))
        self._fetch_coming(ledger)

    def group_for(self, micro_batch: MicroBatch, key: FrameKey, arguments: Any, ledger: Ledger) -> OffloadGroup | None:
        """Where saved tensors of a half that is called with these go; None where nothing of it goes to the host."""
        policy = self._policies.get(micro_batch.chunk)
        if policy is None:
            return None
        within = policy.all_half_by_half or ledger.own_backward_follows(micro_batch)
        if within:  # [6]
            group = None if policy.pace_bytes is None else self._going(micro_batch).half_begins(key)
        else:
            group = self._group(micro_batch)
        if group is not None:
            first = within and group.half == 1  # what the chunk was given: Megatron holds it until its forward is over
            for index, tensor in enumerate(tensors_in(arguments)):
                if index > 0 or tensor.is_leaf or first:  # masks and tables, which layers share; what the stage received
                    group.leave([tensor])
        return group

    def _group(self, micro_batch: MicroBatch) -> OffloadGroup | None:
        """The group of a micro-batch that goes when its forward is over; None where it already has all that the plan sends."""
        self.settle()
        if micro_batch not in self._groups:
            self._groups[micro_batch] = self.open(micro_batch.number, micro_batch.chunk)
        group = self._groups[micro_batch]
        group.half += 1
        return None if group.full else group

    def _going(self, micro_batch: MicroBatch) -> HalfByHalf:
        if micro_batch not in self._half_by_half:
            chunk = micro_batch.chunk
            group = self.open(micro_batch.number, chunk)
            self._half_by_half[micro_batch] = HalfByHalf(group, lambda half: self._pool(chunk, half), self.out)
        return self._half_by_half[micro_batch]

    def _fetch_coming(self, ledger: Ledger) -> None:
        """Start bringing back what the next backwards need, as far ahead as the plan says."""
        for ahead in range(self._furthest):
            micro_batch = ledger.coming(ahead)
            group = self._groups.get(micro_batch) if micro_batch is not None else None
            if group is not None and ahead < group.policy.prefetch:
                self.fetch(group)

    # --- groups, out and back ---------------------------------------------------------------------------------------

    def open(self, micro_batch: int, chunk: int) -> OffloadGroup:
        """A forward of a chunk that has a policy begins."""
        if chunk not in self._lasting_of:
            self._lasting_of[chunk] = {storage_of(tensor) for tensor in self._lasting(chunk)}
        owner, lasting = Owner(self._where[chunk], micro_batch), self._lasting_of[chunk]
        return OffloadGroup(owner, self._policies[chunk], self._pool(chunk), self._device.where, self.back, lasting)

    def _pool(self, chunk: int, half: int = 0) -> HostPool:
        if (chunk, half) not in self._pools:
            policy, where = self._policies[chunk], self._where[chunk]
            sets, ahead = policy.paced_sets if half else policy.sets, self._ahead.get((chunk, half > 0))
            self._pools[chunk, half] = HostPool(where, self._device, self._limit, sets, ragged=policy.ragged, ahead=ahead)
        return self._pools[chunk, half]

    def settle(self) -> None:
        """Let go of what was copied, where the copies are over."""
        while self._leaving and self._leaving[0].copy.done:
            for storage in self._leaving.popleft().alive():
                storage.settle()
        self.out.settle()
        self.back.settle()

    def depart(self, group: OffloadGroup, outputs: Any) -> None:
        """Its forward is over. Originals of the group before are let go now at the latest: there are never those of three."""
        while self._leaving:
            for storage in self._leaving.popleft().alive():
                storage.release(self.out)
        self._ready.append(_Departure(group, [(weakref.ref(storage), size) for storage, size in group.chosen(outputs)]))
        if not group.policy.avoids_messages:
            self.pass_begins()

    def pass_begins(self) -> None:
        """The exchange behind a forward is over: what waited for that leaves now."""
        for group, chosen in self._ready:
            alive = [(storage, size) for known, size in chosen if (storage := known()) is not None]
            self._leaving += send(group, alive, group.pool, self.out)  # [2]
            group.out |= bool(alive)
        self._ready.clear()

    def fetch(self, group: OffloadGroup | None) -> None:
        """Its backward comes soon, or now. A second call does nothing."""
        if group is not None and group.out:
            group.out = False
            fetch(group.storages())  # [3]

    # --- what it did, and its end --------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Host memory that this stage's blocks have, or will have. What was locked ahead is a little more (`bytes_ahead`)."""
        return sum(pool.bytes for pool in self._pools.values())

    def take_bytes(self) -> tuple[int, int]:
        """Bytes that went out, and back, since this was last asked."""
        return self.out.take_bytes(), self.back.take_bytes()

    def take_waited_s(self, *, exact: bool = True) -> float:
        """Seconds for which compute waited for copies, either way, since this was last asked; `exact`: see `Copier`."""
        return self.out.take_waited_s(exact=exact) + self.back.take_waited_s(exact=exact)

    def abandon(self) -> None:
        """The step failed."""
        self._leaving.clear()
        self._ready.clear()

    def close(self) -> None:
        """Nothing is offloaded any more; what is lent goes with its micro-batch."""
        self.out.close()
        self.back.close()
        for pool in self._pools.values():
            pool.clear()
        for slabs in self._ahead.values():
            slabs.clear()  # pools have the same lists
