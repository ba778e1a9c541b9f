"""Deferring weight gradients: which ones backward may leave for later, and when what was left is computed.

    backward of a half      puts_off? ──yes──> put_off: an entry is pending         ──no──> catch_up, then computed there and then
    a wait                  run(linear): the oldest one of each linear that the plan has put there        filled
    too many bytes          the oldest ones of the chunk run at once                                      flushed
    the last backward       flush(chunk): all that are left run                                           flushed

The last backward is a chunk's last one before its gradients are read: Megatron reduces them right behind it, or the optimizer
reads them. Where gradients are reduced while that backward runs (`overlap_grad_reduce`), its hooks on parameters must find them
whole: then nothing is put off in it, and what is pending of a linear is computed right before the linear's last gradient.

All of this follows from the plan and from the order of the schedule (rule R1). Outside of Megatron's schedules nobody says when a
gradient is read, so nothing is put off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import FrameKey
from megatron_lynx.runtime.pending import Entry, Linear, blocks_of
from megatron_lynx.runtime.policy import DeferralPolicy
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.surroundings import Surroundings

FLUSHED = "flushed"
"""Where an entry ran that no wait took, for the trace."""


class WeightGradients:
    """All deferred weight gradients of one engine.

    Args:
        progress: of that engine; what is pending belongs to it.
        policies: by chunk, what the plan defers.
        surroundings: what an entry runs under as its backward did.
        reduced_in_backward: whether gradients are reduced while a chunk's last backward runs.
    """

    def __init__(
        self, progress: Progress, policies: Sequence[DeferralPolicy], surroundings: Surroundings, *, reduced_in_backward: bool
    ) -> None:
        self._progress = progress
        self._policies = policies
        self._surroundings = surroundings
        self._reduced_in_backward = reduced_in_backward

    @property
    def backward_of(self) -> FrameKey | None:
        """The half whose backward runs, if no code of a half does: not in a forward, nor in a replay."""
        frame = self._progress.ledger.entered if self._progress.scope is None else None
        return None if frame is None else frame.key

    def puts_off(self, linear: Linear) -> bool:
        """Whether the weight gradient is left for later that the backward which runs now would compute."""
        frame, ledger = self._progress.ledger.entered, self._progress.ledger
        if frame is None or self.backward_of is None or frame.policy.layer != linear[0]:
            return False
        if linear not in self._policies[frame.policy.chunk].linears or ledger.running is None:
            return False
        return not (self._reduced_in_backward and ledger.completes_gradients)

    def put_off(self, linear: Linear, operands: Iterable[Tensor], compute: Callable[[], None]) -> None:
        """Leave a weight gradient for later; where it does not fit, run the oldest ones at once. It owns what it reads.

        Args:
            linear: whose weight gradient; `puts_off` has agreed.
            operands: every tensor whose memory the computation holds.
            compute: adds the gradient to where it belongs.
        """
        frame = self._progress.ledger.entered
        assert frame is not None, "a weight gradient is put off in its half's backward"
        chunk, pending, counts = frame.policy.chunk, self._progress.pending, self._progress.counts
        blocks, most = blocks_of(operands), self._policies[chunk].most_bytes
        while pending.bytes_with(chunk, blocks) > most and (oldest := pending.take_oldest(chunk)) is not None:
            self._compute(oldest, FLUSHED)
            counts.flushed += 1
        entry = Entry(linear, frame.policy.half, chunk, frame.micro_batch.number, compute, blocks, self._surroundings.capture())
        counts.deferred += 1
        if sum(blocks.values()) > most:
            self._compute(entry, FLUSHED)
            counts.flushed += 1
            return
        pending.add(entry)
        counts.deferred_bytes = max(counts.deferred_bytes, pending.bytes)

    def catch_up(self, linear: Linear) -> None:
        """A weight gradient is about to be computed where stock computes it: those before it come first."""
        while (entry := self._progress.pending.take(linear)) is not None:
            self._compute(entry, FLUSHED)
            self._progress.counts.flushed += 1

    def run(self, linear: Linear, window: str) -> None:
        """In a wait: compute a linear's oldest weight gradient, if any; for experts, those of all of them of one micro-batch."""
        micro_batch = None
        while (entry := self._progress.pending.take(linear, micro_batch)) is not None:
            self._compute(entry, window)
            self._progress.counts.filled += 1
            micro_batch = entry.micro_batch

    def flush(self, chunk: int) -> None:
        """Compute all that are left of a chunk, the oldest first: its gradients are read next."""
        while (entry := self._progress.pending.take_oldest(chunk)) is not None:
            self._compute(entry, FLUSHED)
            self._progress.counts.flushed += 1

    def _compute(self, entry: Entry, window: str) -> None:
        begin = self._progress.trace.now()
        with torch.no_grad(), self._surroundings.as_captured(entry.surroundings):
            entry.compute()
        layer, _ = entry.linear
        self._progress.trace.add("weight_gradient", begin, layer, entry.half, entry.micro_batch, window)
