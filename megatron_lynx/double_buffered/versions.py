"""Two versions of the weights, in two buffers that take turns.

                 start      U0              U1              U2                    Uj the update that batch j makes
    buffer 0     W(0)       W(0)            copied, W(2)    W(2)
    buffer 1     free       copied, W(1)    W(1)            copied, W(3)
    batch reads  0: W(0)    1: W(0)         2: W(1)         3: W(2)               the older one
    owned        W(0)       W(1)            W(2)            W(3)                  the newer one: by the optimizer and DDP

At update j the buffer of version j - 1 is retired: nobody reads it any more. It is filled with version j, all who own the
weights are pointed at it, and the optimizer steps there, in place as ever. Version j itself stays where it is: micro-batches
in flight find in backward the memory that they read in forward, through the parameter or through a view that autograd saved.

A parameter stays the same object with the same gradient buffer throughout; only `parameter.data` is pointed elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from megatron_lynx.schedule.double_buffered import VERSIONS, buffer_of


class TwoVersions:
    """The weights of one rank, twice.

    Args:
        parameters: all that a forward reads, trained or not; their memory becomes the first buffer.
        owners: what points into that memory now (`double_buffered.owners`), parameters included.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], owners: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = tuple(parameters)
        self._owners = owners
        storages = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage() for parameter in self._parameters}
        twins = [torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device) for storage in storages.values()]
        self._buffers = (list(storages.values()), [twin.untyped_storage() for twin in twins])
        self._place = {storage.data_ptr(): index for buffer in self._buffers for index, storage in enumerate(buffer)}
        self._views = [[self._in_buffer(parameter, buffer) for parameter in self._parameters] for buffer in range(VERSIONS)]
        self._first_buffer = 0
        self.newest = 0
        """The version that the optimizer owns: how many updates were made since the start."""
        self._shown = 0

    @property
    def extra_bytes(self) -> int:
        """What the second version costs."""
        return sum(storage.nbytes() for storage in self._buffers[1])

    def show(self, version: int) -> None:
        """Let the parameters be those of `version`: the newest one or the one before."""
        assert max(self.newest - 1, 0) <= version <= self.newest, f"version {version} is gone or not there yet ({self.newest})"
        if version != self._shown:
            for parameter, view in zip(self._parameters, self._views[self._buffer(version)], strict=True):
                parameter.data = view
            self._shown = version

    @contextmanager
    def update(self) -> Iterator[None]:
        """The optimizer's step goes inside: it makes the next version. Nobody may need the one before the newest any more."""
        self.show(self.newest)
        source, target = self._buffer(self.newest), self._buffer(self.newest + 1)
        self.refill(source, target)
        # An in-place step counts up the version that autograd compares in backward. What was saved of these parameters is in
        # the other buffer, which is not written to.
        with ExitStack() as counters:
            for parameter in self._parameters:
                counters.enter_context(_unsafe_preserve_version_counter(parameter))
            for owner in self._owners():
                if owner.untyped_storage().data_ptr() in self._place:
                    owner.data = self._in_buffer(owner, target)
            yield
        self.newest += 1
        self._shown = self.newest

    def refill(self, source: int, target: int) -> None:
        """Copy one buffer's bytes over the other's."""
        for original, copy in zip(self._buffers[source], self._buffers[target], strict=True):
            _bytes_of(copy).copy_(_bytes_of(original))

    def start_anew(self) -> None:
        """Count versions from the newest one. Nothing may be in flight."""
        self.show(self.newest)
        self._first_buffer, self.newest, self._shown = self._buffer(self.newest), 0, 0

    def retired(self) -> list[torch.Tensor]:
        """The bytes of the buffer that the next update overwrites."""
        return [_bytes_of(storage) for storage in self._buffers[self._buffer(self.newest + 1)]]

    def _buffer(self, version: int) -> int:
        return buffer_of(version + self._first_buffer)

    def _in_buffer(self, tensor: torch.Tensor, buffer: int) -> torch.Tensor:
        """What `tensor` would be if it looked into that buffer, at the same place."""
        storage = self._buffers[buffer][self._place[tensor.untyped_storage().data_ptr()]]
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
