"""When the activations of a stage move to the host and back: fixed by the order of passes (rule R1, docs/offloading.md).

As a whole, a micro-batch is copied out after its forward, its originals are freed at the end of the next such forward at the
latest, and it is copied back when the backward before its own begins, or its gradient is awaited. If its backward follows its
forward, it stays on the device, or moves half by half if there is a pace.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from megatron_lynx.anatomy import HALVES
from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.pace import Pace
from megatron_lynx.runtime.device import Device, Trace, copiers_for
from megatron_lynx.runtime.frame import MicroBatch
from megatron_lynx.runtime.offload.group import OffloadGroup, OffloadPolicy
from megatron_lynx.runtime.offload.host_memory import HostLimit, HostMemory, bytes_ahead, too_little
from megatron_lynx.runtime.order import Ledger
from megatron_lynx.runtime.saved import storage_of


class Locked(NamedTuple):
    bytes: int
    seconds: float


class Offloader:
    """The offload groups of one stage, by chunk. Raises `OffloadError` if `limit` is less than the plan's bytes."""

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
        self.policies = dict(policies)
        self._avoids_messages = any(policy.avoids_messages for policy in policies.values())
        self._limit = limit
        self._memory = HostMemory(where, device, limit)
        self.locked = Locked(0, 0.0)
        self._device = device
        self._lasting = lasting
        self._lasting_of: dict[int, set[int]] = {}
        """Storages of parameters and buffers, by chunk, until the next step: weights do not move within a step."""
        self._groups: weakref.WeakKeyDictionary[MicroBatch, OffloadGroup] = weakref.WeakKeyDictionary()
        self._departing: OffloadGroup | None = None
        """The last micro-batch that left as a whole."""

    def lock_ahead(self) -> None:
        """Page-lock the plan's bytes, if the limit has a margin. Raises `OffloadError`."""
        known = [policy for policy in self.policies.values() if policy.sets and not policy.ragged]
        wanted_bytes = sum(policy.sets * bytes_ahead(policy.bytes, policy.smallest_tensor_bytes) for policy in known)
        if known and wanted_bytes <= self._limit.most_bytes:
            begin_s = time.perf_counter()
            self._memory.lock(wanted_bytes)
            self.locked = Locked(self._limit.held_bytes, time.perf_counter() - begin_s)

    def step_begins(self) -> None:
        self._lasting_of.clear()

    def forward_begins(self, ledger: Ledger) -> None:
        if not self.policies:
            return
        self._send()
        if ledger.before_other:
            self._fetch(ledger.coming)

    def group_for(self, micro_batch: MicroBatch, key: FrameKey, arguments: Any, ledger: Ledger) -> OffloadGroup | None:
        """Return the group for saved tensors of a half that is called with these arguments; None if all of them stay."""
        policy = self.policies.get(micro_batch.chunk)
        if policy is None:
            return None
        group = self._groups.get(micro_batch)
        if group is None:
            whole = not (policy.all_half_by_half or ledger.own_backward_follows(micro_batch))
            if not whole and policy.pace_bytes is None:
                return None
            group = self._groups[micro_batch] = self.open(micro_batch.number, micro_batch.chunk, whole=whole)
        if group.pace.whole:
            self.settle()
        return group.half_begins(key, arguments)

    def half_ends(self, micro_batch: MicroBatch, key: FrameKey, outputs: Any, ahead: int) -> None:
        if (group := self._groups.get(micro_batch)) is not None:
            group.half_ends(key, outputs, ahead)

    def forward_ends(self, micro_batch: MicroBatch | None, output: Any) -> None:
        if micro_batch is not None and (group := self._groups.get(micro_batch)) is not None:
            self.leave(group, output)

    def exchange_begins(self) -> None:
        if self._avoids_messages:
            self.out.give_way()
            self.back.give_way()

    def gradient_awaited(self, ledger: Ledger) -> None:
        """Report that a backward's gradient is in flight: a message, so copies that avoid messages wait for the backward."""
        if self.policies and not self._avoids_messages:
            self._fetch(ledger.coming)

    def backward_begins(self, micro_batch: MicroBatch | None, ledger: Ledger) -> None:
        if not self.policies:
            return
        self.settle()
        self._send()
        self._fetch(micro_batch)
        self._fetch(ledger.coming)

    def backward_reaches(self, micro_batch: MicroBatch, key: FrameKey) -> None:
        if (group := self._groups.get(micro_batch)) is not None:
            group.fetch(group.place(key))

    def open(self, micro_batch: int, chunk: int, *, whole: bool = True) -> OffloadGroup:
        if chunk not in self._lasting_of:
            self._lasting_of[chunk] = {storage_of(tensor) for tensor in self._lasting(chunk)}
        policy = self.policies[chunk]
        pace = Pace(None if whole else policy.pace_bytes, len(HALVES) * policy.layers[1])
        where, lasting = self._device.where, self._lasting_of[chunk]
        return OffloadGroup(micro_batch, chunk, policy, pace, self._memory, where, self.out, self.back, lasting)

    def leave(self, group: OffloadGroup, output: Any) -> None:
        """End a group's forward. As a whole it leaves now, and the group before is freed, so that at most two are resident."""
        group.forward_ends(output)
        if group.pace.whole:
            if self._departing is not None:
                self._departing.release()
            self._departing = group
            if not group.policy.avoids_messages:
                self._send()

    def settle(self) -> None:
        if self._departing is not None:
            self._departing.settle()
        self.out.settle()
        self.back.settle()

    def _send(self) -> None:
        if self._departing is not None:
            self._departing.send()

    def _fetch(self, micro_batch: MicroBatch | None) -> None:
        group = self._groups.get(micro_batch) if micro_batch is not None else None
        if group is not None and group.pace.whole:
            group.fetch()

    @property
    def host_bytes(self) -> int:
        """Bytes of this stage's rooms on the host, without the margin that was locked ahead (`bytes_ahead`)."""
        return self._memory.bytes

    def take_bytes(self) -> tuple[int, int]:
        """Bytes copied (out, back) since the last call."""
        return self.out.take_bytes(), self.back.take_bytes()

    def take_waited_s(self, *, exact: bool = True) -> float:
        return self.out.take_waited_s(exact=exact) + self.back.take_waited_s(exact=exact)

    def abandon(self) -> None:
        self._departing = None

    def close(self) -> None:
        """Free host memory; rooms in use return when their micro-batch is freed."""
        self.out.close()
        self.back.close()
        self._memory.clear()
