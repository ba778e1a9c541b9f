"""When the copies of a stage are asked for, and of what: the passes call, the offloader copies.

    forward_begins    reloads for the backwards that come next, if this forward is the pass before one
      a half runs     shipment_of: what of it may go
    forward_ends      its shipment departs
    exchange_begins   where copies avoid messages: those under way come first
    gradient_awaited  reloads for the backwards that come next
    backward_begins   its own reloads, if nobody asked yet, and those for the backwards behind it; what left is let go
    backward_ends     what left is let go

Without an offloader nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_lynx.runtime.ledger import Ledger
from megatron_lynx.runtime.micro_batch import MicroBatch
from megatron_lynx.runtime.offload import Offloader
from megatron_lynx.runtime.saved import tensors_in
from megatron_lynx.runtime.shipment import Shipment
from megatron_lynx.runtime.windows import Windows


class Shipping:
    """Asks the offloader of one engine for copies, pass by pass."""

    def __init__(self, offloader: Offloader | None, ledger: Ledger, windows: Sequence[Windows]) -> None:
        self._offloader = offloader
        self._ledger = ledger
        self._windows = windows

    def forward_begins(self) -> None:
        if self._offloader is not None:
            self._offloader.pass_begins()
            if self._ledger.hidden_by_forward() is not None:
                self._fetch_coming(self._offloader)

    def forward_ends(self, micro_batch: MicroBatch | None, output: Any) -> None:
        if self._offloader is not None and micro_batch is not None and micro_batch.shipment is not None:
            self._offloader.depart(micro_batch.shipment, output)

    def exchange_begins(self) -> None:
        """Messages between stages are about to be issued."""
        if self._offloader is not None:
            self._offloader.exchange_begins()

    def gradient_awaited(self) -> None:
        """A backward's gradient is on its way. That is a message: copies that avoid those wait for the backward."""
        if self._offloader is not None and not self._offloader.avoids_messages:
            self._fetch_coming(self._offloader)

    def backward_begins(self, micro_batch: MicroBatch | None) -> None:
        if self._offloader is not None:
            self._offloader.settle()
            self._offloader.pass_begins()
            if micro_batch is not None:
                self._offloader.fetch(micro_batch.shipment)
            self._fetch_coming(self._offloader)

    def backward_ends(self) -> None:
        """In cool-down no forward comes that would let originals go whose copies are over."""
        if self._offloader is not None:
            self._offloader.settle()

    def shipment_of(self, micro_batch: MicroBatch, arguments: Any) -> Shipment | None:
        """What may go to the host of a half that is called with these; None where nothing goes."""
        offloader, chunk = self._offloader, micro_batch.chunk
        if offloader is None or chunk not in offloader.policies or self._ledger.own_backward_follows(micro_batch):
            return None
        if micro_batch.index in self._windows[chunk].whole:
            return None
        offloader.settle()
        if micro_batch.shipment is None:
            micro_batch.shipment = offloader.open(micro_batch.number, chunk)
        for index, tensor in enumerate(tensors_in(arguments)):
            if index > 0 or tensor.is_leaf:  # masks and tables, which layers share; what the stage received
                micro_batch.shipment.leave([tensor])
        return None if micro_batch.shipment.full else micro_batch.shipment

    def _fetch_coming(self, offloader: Offloader) -> None:
        """Start bringing back what the next backwards need, as far ahead as the plan says."""
        for ahead in range(offloader.furthest):
            micro_batch = self._ledger.coming(ahead)
            if micro_batch is not None and micro_batch.shipment is not None and ahead < micro_batch.shipment.policy.prefetch:
                offloader.fetch(micro_batch.shipment)
