"""Delays weight gradients: which ones backward leaves, and when they are computed (docs/runtime.md).

A wait takes the oldest entry of each linear that the plan has there: of experts those of one micro-batch, of a gradient in pieces
one piece. If gradients are reduced during a chunk's last backward (`overlap_grad_reduce`, unless stages reduce together after it:
`align_grad_reduce`), nothing is delayed in it, and pending ones of a linear run before the linear's last gradient.

Delays follow from the plan and the schedule's order only (rule R1). Outside of Megatron's schedules nothing is delayed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy import Half
from megatron_lynx.runtime.frame import ChunkPolicy
from megatron_lynx.runtime.order import Progress
from megatron_lynx.runtime.surroundings import Surroundings
from megatron_lynx.timeline import FLUSHED

Linear = tuple[int, str]


@dataclass(frozen=True, eq=False)
class Entry:
    linear: Linear
    """For experts, their item: experts that run one by one have an entry each."""
    half: Half
    chunk: int
    micro_batch: int
    compute: Callable[[], object]
    blocks: Mapping[int, int]
    """Bytes of each block of memory that its operands hold, by address. Entries of experts may share blocks."""
    surroundings: Any = ()
    piece: int = 0
    """Which of the pieces of its weight gradient; for experts, which group of them."""


@dataclass(eq=False)
class WeightGradients:
    """All delayed weight gradients of one engine, in a FIFO queue per linear: additions to a parameter's gradient keep their
    order, so that each sum equals stock's in every bit. An entry owns its operands, and their bytes count until it is computed.
    `reduced_in_backward`: returns whether gradients are reduced during a chunk's last backward."""

    progress: Progress
    policies: Sequence[ChunkPolicy]
    surroundings: Surroundings
    reduced_in_backward: Callable[[], bool]
    _of: dict[Linear, deque[Entry]] = field(default_factory=dict)
    _in_order: dict[int, dict[Entry, None]] = field(default_factory=dict)
    _bytes: Counter[int] = field(default_factory=Counter)
    _holders: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many entries hold a block, by (chunk, address)."""

    def __len__(self) -> int:
        return sum(map(len, self._in_order.values()))

    @property
    def bytes(self) -> int:
        return self._bytes.total()

    def bytes_with(self, chunk: int, blocks: Mapping[int, int]) -> int:
        return self._bytes[chunk] + sum(size for block, size in blocks.items() if not self._holders[chunk, block])

    def add(self, entry: Entry) -> None:
        self._of.setdefault(entry.linear, deque()).append(entry)
        self._in_order.setdefault(entry.chunk, {})[entry] = None
        self._bytes[entry.chunk] = self.bytes_with(entry.chunk, entry.blocks)
        self._holders.update((entry.chunk, block) for block in entry.blocks)

    def take(self, linear: Linear, taken: Entry | None = None) -> Entry | None:
        """Remove and return the oldest entry of a linear, if any, and if it is of the same wait as `taken`."""
        queue = self._of.get(linear)
        if not queue or (taken and (taken.micro_batch, taken.piece) != (queue[0].micro_batch, queue[0].piece)):
            return None
        entry = queue.popleft()
        del self._in_order[entry.chunk][entry]
        self._holders.subtract((entry.chunk, block) for block in entry.blocks)
        for block, size in entry.blocks.items():
            if not self._holders[entry.chunk, block]:
                del self._holders[entry.chunk, block]
                self._bytes[entry.chunk] -= size
        return entry

    def take_oldest(self, chunk: int) -> Entry | None:
        oldest = next(iter(self._in_order.get(chunk, ())), None)
        return None if oldest is None else self.take(oldest.linear)

    def clear(self) -> None:
        for held in (self._of, self._in_order, self._bytes, self._holders):
            held.clear()

    def puts_off(self, linear: Linear) -> bool:
        frame, ledger = self.progress.in_backward_of, self.progress.ledger
        if frame is None or ledger.running is None or frame.policy.layer != linear[0]:
            return False
        if not frame.policy.delays(linear[1], drains=ledger.drains):
            return False
        return not (ledger.completes_gradients and self.reduced_in_backward())

    @property
    def puts_off_gathered(self) -> bool:
        """Whether the present gather may feed a delayed weight gradient. Row-parallel linears gather no input. Several of latent
        attention cannot be distinguished here: if one of them delays, it may."""
        if (frame := self.progress.in_backward_of) is None:
            return False
        section, layer = frame.policy.section, frame.policy.layer
        gathering = (name for name in frame.policy.deferred if section.of_name[name].role != "row_parallel")
        return any(self.puts_off((layer, name)) for name in gathering)

    def puts_off_or_catches_up(self, linear: Linear) -> bool:
        """Return whether a weight gradient may be put off now; if not, compute pending ones of the linear, which come first."""
        if self.puts_off(linear):
            return True
        while (entry := self.take(linear)) is not None:
            self._compute(entry, FLUSHED)
        return False

    def put_off(self, linear: Linear, operands: Iterable[Tensor], pieces: Mapping[int, Callable[[], object]]) -> None:
        """Delay a weight gradient for which `puts_off` returned True; if it does not fit, compute the oldest ones first.

        `operands`: every tensor whose memory the computation holds. `pieces`: by index; one if it is not cut.
        """
        frame = self.progress.ledger.entered
        assert frame is not None, "a weight gradient is put off in its half's backward"
        chunk, counts = frame.policy.chunk, self.progress.counts
        blocks, limit_bytes = blocks_of(operands), self.policies[chunk].most_delayed_bytes
        while self.bytes_with(chunk, blocks) > limit_bytes and (oldest := self.take_oldest(chunk)) is not None:
            self._compute(oldest, FLUSHED)
        half, number, surroundings = frame.policy.half, frame.micro_batch.number, self.surroundings.capture()
        counts.deferred += len(pieces)
        for piece, compute in pieces.items():
            entry = Entry(linear, half, chunk, number, compute, blocks, surroundings, piece)
            if sum(blocks.values()) > limit_bytes:
                self._compute(entry, FLUSHED)
            else:
                self.add(entry)
        counts.deferred_bytes = max(counts.deferred_bytes, self.bytes)

    def run(self, linear: Linear, window: str) -> None:
        """Compute a linear's oldest weight gradient or piece in a wait, if any; for experts, of all or a group of them."""
        taken = None
        while (taken := self.take(linear, taken)) is not None:
            self._compute(taken, window)

    def flush(self, chunk: int) -> None:
        while (entry := self.take_oldest(chunk)) is not None:
            self._compute(entry, FLUSHED)

    def _compute(self, entry: Entry, window: str) -> None:
        begin = self.progress.trace.begin()
        with torch.no_grad(), self.surroundings.as_captured(entry.surroundings):
            entry.compute()
        self.progress.counts.flushed += window == FLUSHED
        self.progress.counts.filled += window != FLUSHED
        self.progress.trace.add("weight_gradient", begin, (entry.linear[0], entry.half), entry.micro_batch, window)


def blocks_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
