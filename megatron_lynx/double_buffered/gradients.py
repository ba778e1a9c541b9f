"""Two gradient buffers: one holds a batch's whole gradient until its deferred update, the other one begins the next batch's.

    deferral 2      B(j, last)   B(j+1, 0)   B(j+1, 1)   Uj        B(j+1, 2) ...
    buffer j mod 2   += ─────────  whole gradient of batch j ── step, then cleared for batch j + 2
    buffer j+1 mod 2              += ──────── += ────────────────── += ...

DDP's buffers, its buckets and the parameters' `main_grad` are pointed at one or the other. Between calls they are at the batch
that was updated last: what Megatron's training clears before each step is that one.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron_lynx.double_buffered.buffers import TwoBuffers
from megatron_lynx.double_buffered.owners import gradient_owners
from megatron_lynx.schedule.double_buffered import buffer_of


class TwoGradients:
    """The gradient buffers of one chunk in Megatron's DistributedDataParallel, twice."""

    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self.buffers = TwoBuffers(gradient_owners(chunk))
        self._first_buffer = 0
        self._shown = 0
        self._awaited: list[Any] = []
        """Reductions that were already waited for, and that DDP has not ended yet."""

    def show(self, batch: int) -> None:
        """Point all gradients at the buffer of `batch`."""
        if batch != self._shown:
            self._wait_for_reductions()
            self.buffers.point(gradient_owners(self._chunk), buffer_of(batch + self._first_buffer))
            self._shown = batch

    def _wait_for_reductions(self) -> None:
        """Wait for reductions that DDP began in a batch's last backward, before the tensors they reduce are pointed elsewhere.

        Each is waited for only once, while its batch is shown: at the wait gloo copies its result to where the tensors point.
        DDP waits again when it ends the reduction, when this batch is shown again.
        """
        groups = self._chunk.bucket_groups + self._chunk.expert_parallel_bucket_groups
        under_way = [group.grad_reduce_handle for group in groups if group.grad_reduce_handle is not None]
        for handle in under_way:
            if not any(handle is awaited for awaited in self._awaited):
                handle.wait()
        self._awaited = under_way

    def hidden(self) -> list[torch.Tensor]:
        """The bytes of the buffer that is not shown."""
        return self.buffers.memory(buffer_of(self._shown + self._first_buffer + 1))

    def start_anew(self) -> None:
        """Count batches from 0, in the buffer that is shown. Both must be free, or be cleared next."""
        self._first_buffer, self._shown = buffer_of(self._shown + self._first_buffer), 0
