"""Two buffers for the memory of some tensors, which are pointed from one to the other.

A tensor keeps its identity, its attributes and its place in the graph; only `tensor.data` changes.

Two versions of the weights, in alternating buffers:

                 start      U0              U1              U2                    Uj the update of batch j
    buffer 0     W(0)       W(0)            copied, W(2)    W(2)
    buffer 1     free       copied, W(1)    W(1)            copied, W(3)
    batch reads  0: W(0)    1: W(0)         2: W(1)         3: W(2)               the older one
    owned        W(0)       W(1)            W(2)            W(3)                  the newer one: by the optimizer and DDP

At update j the buffer of version j - 1 is retired. It is filled with version j, all owners of the weights are pointed at it, and
the optimizer steps there in place. Version j itself is not written: micro-batches in flight read the same memory in backward as
in forward, through the parameter or through a view that autograd saved.

Two gradient buffers: one has a batch's whole gradient until its deferred update, the other one starts the next batch's.

    deferral 2      B(j, last)   B(j+1, 0)   B(j+1, 1)   Uj        B(j+1, 2) ...
    buffer j mod 2   += ─────────  whole gradient of batch j ── step, then cleared for batch j + 2
    buffer j+1 mod 2              += ──────── += ────────────────── += ...

DDP's buffers, its buckets and the parameters' `main_grad` are pointed at one of them. Between calls they are at the batch that
was updated last, whose gradient Megatron clears before each step.

Tensors of Megatron that share memory with weights or gradients, and must follow them (`owners`):

    parameter.data                          all of them
    the flat buffer and its buckets         of DDP with the distributed optimizer, which gathers updated weights into them
    a rank's shards of the buckets          as DDP caches them between gathers
    a rank's shards of the parameters       of the distributed optimizer: fp32 ones are updated in place
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_lynx.schedule.double_buffered import buffer_of


class TwoBuffers:
    """Buffer 0 is the memory of `tensors`; buffer 1 is a second one of the same size, zeroed."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        first = [storage for storage in storages.values() if storage.nbytes()]
        twins = [torch.zeros(storage.nbytes(), dtype=torch.uint8, device=storage.device) for storage in first]
        self._buffers = first, [twin.untyped_storage() for twin in twins]
        self._place = {storage.data_ptr(): index for buffer in self._buffers for index, storage in enumerate(buffer)}

    @property
    def extra_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._buffers[1])

    def point(self, tensors: Iterable[torch.Tensor], buffer: int) -> None:
        """Point those of `tensors` that are in either buffer to the same place in this one."""
        for tensor in tensors:
            index = self._place.get(tensor.untyped_storage().data_ptr())
            if index is not None:
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                storage = self._buffers[buffer][index]
                tensor.data = empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def copy(self, source: int, target: int) -> None:
        for original, copied in zip(self.memory(source), self.memory(target), strict=True):
            copied.copy_(original)

    def memory(self, buffer: int) -> list[torch.Tensor]:
        empties = [torch.empty(0, dtype=torch.uint8, device=storage.device) for storage in self._buffers[buffer]]
        return [
            empty.set_(storage, 0, (storage.nbytes(),), (1,))
            for empty, storage in zip(empties, self._buffers[buffer], strict=True)
        ]


class TwoVersions:
    """Two versions of one rank's weights. `owners`: returns the tensors that point into the parameters' memory now."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], owners: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = tuple(parameters)
        self._owners = owners
        self.buffers = TwoBuffers(self._parameters)
        self.newest = 0
        """Newest version, the optimizer's: updates since the start."""
        self._first_buffer = 0
        self._shown = 0

    @contextmanager
    def seen(self, version: int) -> Iterator[None]:
        shown = self._shown
        self.show(version)
        try:
            yield
        finally:
            self.show(shown)

    def show(self, version: int) -> None:
        assert max(self.newest - 1, 0) <= version <= self.newest, f"version {version} is gone or not there yet ({self.newest})"
        if version != self._shown:
            self.buffers.point(self._parameters, self._buffer(version))
            self._shown = version

    @contextmanager
    def update(self) -> Iterator[None]:
        """Run the optimizer's step inside: it writes the next version over the one before the newest."""
        self.show(self.newest)
        target = self._buffer(self.newest + 1)
        self.refill(self._buffer(self.newest), target)
        # keep the version counters that autograd compares: tensors saved of these parameters are in the other buffer
        with ExitStack() as counters:
            for parameter in self._parameters:
                counters.enter_context(_unsafe_preserve_version_counter(parameter))
            self.buffers.point(self._owners(), target)
            yield
        self.newest += 1
        self._shown = self.newest

    def refill(self, source: int, target: int) -> None:
        self.buffers.copy(source, target)

    def start_anew(self) -> None:
        """Count versions from the newest one. Only while none of the micro-batches is in flight."""
        self.show(self.newest)
        self._first_buffer, self.newest, self._shown = self._buffer(self.newest), 0, 0

    def _buffer(self, version: int) -> int:
        return buffer_of(version + self._first_buffer)


class TwoGradients:
    def __init__(self, chunk: Any) -> None:
        self._chunk = chunk
        self.buffers = TwoBuffers(gradient_owners(chunk))
        self._first_buffer = 0
        self._shown = 0
        self._awaited: list[Any] = []
        """Reductions that were waited for, and that DDP has not ended yet."""

    def show(self, batch: int) -> None:
        if batch != self._shown:
            self._wait_for_reductions()
            self.buffers.point(gradient_owners(self._chunk), buffer_of(batch + self._first_buffer))
            self._shown = batch

    def _wait_for_reductions(self) -> None:
        """Wait for reductions that DDP began in a batch's last backward, before their tensors are pointed elsewhere.

        Each is waited for once, while its batch is shown: at the wait gloo copies its result to where the tensors point. DDP
        waits again when it ends the reduction, when this batch is shown again.
        """
        handles = (group.grad_reduce_handle for group in self._chunk.bucket_groups)
        under_way = [handle for handle in handles if handle is not None]
        for handle in under_way:
            if not any(handle is awaited for awaited in self._awaited):
                handle.wait()
        self._awaited = under_way

    def hidden(self) -> list[torch.Tensor]:
        return self.buffers.memory(buffer_of(self._shown + self._first_buffer + 1))

    def start_anew(self) -> None:
        """Count batches from 0, in the shown buffer. Both must be free, or be cleared next."""
        self._first_buffer, self._shown = buffer_of(self._shown + self._first_buffer), 0


SHARDS = ("shard_float16_groups", "shard_fp32_groups")
"""Attributes of Megatron's distributed optimizer with groups of views into the flat buffer."""


def owners(chunk: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    tensors = [*chunk.parameters(), *_of_ddp(chunk, "param")]
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        tensors += [tensor for name in SHARDS for group in getattr(part, name, []) for tensor in group]
    return (tensor for tensor in tensors if tensor is not None)


def gradient_owners(chunk: Any) -> Iterator[torch.Tensor]:
    yield from (parameter.main_grad for parameter in chunk.parameters() if hasattr(parameter, "main_grad"))
    yield from _of_ddp(chunk, "grad")


def _of_ddp(chunk: Any, data: Literal["param", "grad"]) -> Iterator[Any]:
    """Flat buffers, their buckets, and a rank's shards of these. (Buffers of experts are none: experts are refused.)"""
    if not hasattr(chunk, "bucket_groups"):
        return
    for buffer in chunk.buffers:
        yield from (getattr(flat, f"{data}_data") for flat in (buffer, *buffer.buckets))
    for group in chunk.bucket_groups:
        yield from (shard for shards in getattr(group, f"cached_{data}_buffer_shard_list") for shard in shards or ())
