"""Delays weight gradients: which ones backward leaves, and when they are computed.

    backward of a half      puts_off? ──yes──> put_off: an entry is pending         ──no──> catch_up, then computed at once
    a wait                  run(linear): the oldest one, or piece, of each linear that the plan has there filled
    its gradient is sent    the same (`pipe.send_backward`); the stage before need not wait for them      filled
    too many bytes          the oldest ones of the chunk run at once                                      flushed
    the last backward       flush(chunk): all remaining ones run, after its gradient is sent              flushed

The last backward is a chunk's last one before its gradients are reduced or read. If gradients are reduced during that backward
(`overlap_grad_reduce`, unless stages reduce together after it: `align_grad_reduce`), hooks on parameters must find them complete:
nothing is delayed in it, and pending ones of a linear run before the linear's last gradient.

Delays follow from the plan and the schedule's order only (rule R1). Outside of Megatron's schedules nothing is delayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.pending import Entry, Linear, blocks_of
from megatron_lynx.runtime.policy import ChunkPolicy
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.surroundings import Surroundings

FLUSHED = "flushed"
"""Trace label of entries that ran outside of waits."""


class WeightGradients:
    """All delayed weight gradients of one engine.

    Args:
        progress: of that engine.
        policies: by chunk.
        surroundings: restored while an entry is computed.
        reduced_in_backward: returns whether gradients are reduced during a chunk's last backward.
    """

    def __init__(
        self,
        progress: Progress,
        policies: Sequence[ChunkPolicy],
        surroundings: Surroundings,
        *,
        reduced_in_backward: Callable[[], bool],
    ) -> None:
        self._progress = progress
        self._policies = policies
        self._surroundings = surroundings
        self._reduced_in_backward = reduced_in_backward

    @property
    def backward_of(self) -> FrameKey | None:
        """The half whose backward runs, outside of forwards and recomputations."""
        frame = self._progress.ledger.entered if self._progress.scope is None else None
        return None if frame is None else frame.key

    def puts_off(self, linear: Linear) -> bool:
        """Return whether the linear's weight gradient is delayed in the running backward."""
        frame, ledger = self._progress.ledger.entered, self._progress.ledger
        if frame is None or self.backward_of is None or frame.policy.layer != linear[0]:
            return False
        policy = self._policies[frame.policy.chunk]
        if linear not in policy.delayed or ledger.running is None or (linear in policy.in_drain and not ledger.drains):
            return False
        return not (ledger.completes_gradients and self._reduced_in_backward())

    def put_off(self, linear: Linear, operands: Iterable[Tensor], pieces: Mapping[int, Callable[[], object]]) -> None:
        """Delay a weight gradient; if it does not fit, compute the oldest ones first.

        Args:
            linear: for which `puts_off` returned True.
            operands: every tensor whose memory the computation holds.
            pieces: each adds a part of the gradient to where it belongs, by its index; one if it is not cut.
        """
        frame = self._progress.ledger.entered
        assert frame is not None, "a weight gradient is put off in its half's backward"
        chunk, pending, counts = frame.policy.chunk, self._progress.pending, self._progress.counts
        blocks, limit_bytes = blocks_of(operands), self._policies[chunk].most_delayed_bytes
        while pending.bytes_with(chunk, blocks) > limit_bytes and (oldest := pending.take_oldest(chunk)) is not None:
            self._compute(oldest, FLUSHED)
        half, number, surroundings = frame.policy.half, frame.micro_batch.number, self._surroundings.capture()
        counts.deferred += len(pieces)
        for piece, compute in pieces.items():
            entry = Entry(linear, half, chunk, number, compute, blocks, surroundings, piece)
            if sum(blocks.values()) > limit_bytes:
                self._compute(entry, FLUSHED)
            else:
                pending.add(entry)
        counts.deferred_bytes = max(counts.deferred_bytes, pending.bytes)

    def catch_up(self, linear: Linear) -> None:
        """Compute the pending ones of a linear, before one that is not delayed."""
        while (entry := self._progress.pending.take(linear)) is not None:
            self._compute(entry, FLUSHED)

    def run(self, linear: Linear, window: str) -> None:
        """Compute a linear's oldest weight gradient or piece in a wait, if any; for experts, of all or a group of them."""
        taken = None
        while (taken := self._progress.pending.take(linear, taken)) is not None:
            self._compute(taken, window)

    def flush(self, chunk: int) -> None:
        """Compute all pending ones of a chunk, the oldest first."""
        while (entry := self._progress.pending.take_oldest(chunk)) is not None:
            self._compute(entry, FLUSHED)

    def _compute(self, entry: Entry, window: str) -> None:
        begin = self._progress.trace.now()
        with torch.no_grad(), self._surroundings.as_captured(entry.surroundings):
            entry.compute()
        if window == FLUSHED:
            self._progress.counts.flushed += 1
        else:
            self._progress.counts.filled += 1
        layer, _ = entry.linear
        self._progress.trace.add("weight_gradient", begin, layer, entry.half, entry.micro_batch, window)
