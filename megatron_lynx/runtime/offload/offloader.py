"""When the activations of a stage go to the host and come back: fixed by the order of passes, which the engine reports (rule R1).

    half of k         [1] saved tensors are pushed to the micro-batch's group (`group`), which holds each storage once. Half by
                          half they leave and come back within its own passes; the rest is about whole micro-batches
    end of forward    [2] storages in the order in which they were made, up to the plan's bytes, are copied out, half by half.
                          Originals are freed when they are copied: at the end of the next such forward at the latest
    backward of k-d   [3] begins (d: the prefetch distance), or the gradient for it is awaited, or the forward right before it
                          begins: storages of k are copied back, last one first
    backward of k     [4] a node asks for its tensor and waits for its storage
    exchanges         [5] where copies avoid messages: [2] waits for the pass after the exchange, the exchange for all copies
    own backward      [6] follows at once: the micro-batch stays on the device, or moves half by half if there is a pace

Storages made first live longest and are needed last, so they go. They belong to the handles that autograd's graph and frames
hold: when the graph goes they go, and their host blocks with them (rule R8).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.frame import MicroBatch
from megatron_lynx.runtime.offload.copier import Owner, copiers_for
from megatron_lynx.runtime.offload.group import OffloadGroup, OffloadPolicy
from megatron_lynx.runtime.offload.host_memory import HostLimit, HostMemory, bytes_ahead, too_little
from megatron_lynx.runtime.order import Ledger
from megatron_lynx.runtime.saved import storage_of
from megatron_lynx.runtime.trace import Trace


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
        needed_bytes = sum(policy.bytes * policy.sets for policy in policies.values())
        if needed_bytes > limit.most_bytes:
            raise too_little(where, needed_bytes, limit)
        self.trace = Trace(device)
        self.out, self.back = copiers_for(device, self.trace)
        self._policies = dict(policies)
        self._furthest = max((policy.prefetch for policy in policies.values()), default=0)
        self._avoids_messages = any(policy.avoids_messages for policy in policies.values())
        self._where = {chunk: where if len(policies) == 1 else f"{where}, chunk {chunk}" for chunk in policies}
        self._limit = limit
        self._memory = HostMemory(where, device, limit)
        self.locked = Locked(0, 0.0)
        self._device = device
        self._lasting = lasting
        self._lasting_of: dict[int, set[int]] = {}
        """Storages of parameters and buffers, by chunk, until the next step: no other weights are put in place in between."""
        self._groups: weakref.WeakKeyDictionary[MicroBatch, OffloadGroup] = weakref.WeakKeyDictionary()
        self._departing: OffloadGroup | None = None
        """The last micro-batch that left as a whole, whose originals may still be here."""

    @property
    def chunks(self) -> Container[int]:
        """Chunks of which anything goes to the host."""
        return self._policies

    def lock_ahead(self) -> None:
        """Page-lock the plan's bytes before the first step, where the host has room for a little more. What experts keep is not
        known before.

        Raises `OffloadError` where the host does not give it.
        """
        known = [policy for policy in self._policies.values() if policy.sets and not policy.ragged]
        wanted_bytes = sum(policy.sets * bytes_ahead(policy.bytes, policy.smallest_tensor_bytes) for policy in known)
        if known and wanted_bytes <= self._limit.most_bytes:
            begin_s = time.perf_counter()
            self._memory.lock(wanted_bytes)
            self.locked = Locked(self._limit.held_bytes, time.perf_counter() - begin_s)

    # --- what the engine reports ---------------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """Weights may lie elsewhere than in the step before."""
        self._lasting_of.clear()

    def forward_begins(self, ledger: Ledger) -> None:
        self._send()
        if ledger.hidden_by_forward() is not None:
            self._fetch_coming(ledger)

    def group_for(self, micro_batch: MicroBatch, key: FrameKey, arguments: Any, ledger: Ledger) -> OffloadGroup | None:
        """Where saved tensors of a half that is called with these go; None where all of them stay."""
        policy = self._policies.get(micro_batch.chunk)
        if policy is None:
            return None
        group = self._groups.get(micro_batch)
        if group is None:
            whole = not (policy.all_half_by_half or ledger.own_backward_follows(micro_batch))
            if not whole and policy.pace_bytes is None:  # [6]
                return None
            group = self._groups[micro_batch] = self.open(micro_batch.number, micro_batch.chunk, whole=whole)
        if group.pace.whole:
            self.settle()
        return group.half_begins(key, arguments)

    def half_ends(self, micro_batch: MicroBatch, key: FrameKey, outputs: Any, ahead: int) -> None:
        """A half's forward is over; a recomputation of it may begin so many halves before its own backward."""
        if (group := self._groups.get(micro_batch)) is not None:
            group.half_ends(key, outputs, ahead)

    def forward_ends(self, micro_batch: MicroBatch | None, output: Any) -> None:
        if micro_batch is not None and (group := self._groups.get(micro_batch)) is not None:
            self.leave(group, output)

    def exchange_begins(self) -> None:
        """Messages between stages wait for the copies issued so far, where the plan keeps them apart."""
        if self._avoids_messages:
            self.out.give_way()  # [5]
            self.back.give_way()

    def gradient_awaited(self, ledger: Ledger) -> None:
        """A backward's gradient is on its way. That is a message: copies that avoid those wait for the backward."""
        if not self._avoids_messages:
            self._fetch_coming(ledger)

    def backward_begins(self, micro_batch: MicroBatch | None, ledger: Ledger) -> None:
        self.settle()
        self._send()
        self._fetch(micro_batch)
        self._fetch_coming(ledger)

    def backward_reaches(self, micro_batch: MicroBatch, key: FrameKey) -> None:
        """A half's backward begins."""
        if (group := self._groups.get(micro_batch)) is not None:
            group.backward_reaches(key)

    # --- whole micro-batches -------------------------------------------------------------------------------------------

    def open(self, micro_batch: int, chunk: int, *, whole: bool = True) -> OffloadGroup:
        """A forward of a chunk that has a policy begins."""
        if chunk not in self._lasting_of:
            self._lasting_of[chunk] = {storage_of(tensor) for tensor in self._lasting(chunk)}
        policy = self._policies[chunk]
        owner, pace, where = Owner(self._where[chunk], micro_batch), policy.pace(whole=whole), self._device.where
        return OffloadGroup(owner, policy, pace, self._memory, where, self.out, self.back, self._lasting_of[chunk])

    def leave(self, group: OffloadGroup, output: Any) -> None:
        """Its forward is over. As a whole it leaves now, and the one before is freed, so that at most two are here."""
        group.forward_ends(output)
        if group.pace.whole:
            if self._departing is not None:
                self._departing.release()
            self._departing = group
            if not group.policy.avoids_messages:
                self._send()

    def settle(self) -> None:
        """Free what was copied, where the copies are over."""
        if self._departing is not None:
            self._departing.settle()
        self.out.settle()
        self.back.settle()

    def _send(self) -> None:
        """The exchange after a forward is over: the storages that waited for that leave now."""
        if self._departing is not None:
            self._departing.send()  # [2]

    def _fetch(self, micro_batch: MicroBatch | None, ahead: int = -1) -> None:
        group = self._groups.get(micro_batch) if micro_batch is not None else None
        if group is not None and group.pace.whole and ahead < group.policy.prefetch:
            group.fetch()  # [3]

    def _fetch_coming(self, ledger: Ledger) -> None:
        """Start bringing back what the next backwards need, as far ahead as the plan says."""
        for ahead in range(self._furthest):
            self._fetch(ledger.coming(ahead), ahead)

    # --- what it did, and its end --------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """Host memory of this stage's blocks. What was locked ahead is a little more (`bytes_ahead`)."""
        return self._memory.bytes

    def take_bytes(self) -> tuple[int, int]:
        """Bytes that went out, and back, since the last call."""
        return self.out.take_bytes(), self.back.take_bytes()

    def take_waited_s(self, *, exact: bool = True) -> float:
        """Seconds for which compute waited for copies, either way, since the last call; `exact`: see `Copier`."""
        return self.out.take_waited_s(exact=exact) + self.back.take_waited_s(exact=exact)

    def abandon(self) -> None:
        """The step failed."""
        self._departing = None

    def close(self) -> None:
        """Nothing is offloaded any more; what is lent goes with its micro-batch."""
        self.out.close()
        self.back.close()
        self._memory.clear()
