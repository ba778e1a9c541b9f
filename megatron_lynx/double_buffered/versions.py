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

from megatron_lynx.double_buffered.buffers import TwoBuffers
from megatron_lynx.schedule.double_buffered import buffer_of


class TwoVersions:
    """The weights of one rank, twice.

    Args:
        parameters: all that a forward reads, trained or not; their memory becomes the first buffer.
        owners: what points into that memory now (`double_buffered.owners`), parameters included.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], owners: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._parameters = tuple(parameters)
        self._owners = owners
        self.buffers = TwoBuffers(self._parameters)
        self.newest = 0
        """The version that the optimizer owns: how many updates were made since the start."""
        self._first_buffer = 0
        self._shown = 0

    @contextmanager
    def seen(self, version: int) -> Iterator[None]:
        """Show a version inside the block, and afterwards the one that was shown before."""
        shown = self._shown
        self.show(version)
        try:
            yield
        finally:
            self.show(shown)

    def show(self, version: int) -> None:
        """Point the parameters at `version`: the newest one or the one before."""
        assert max(self.newest - 1, 0) <= version <= self.newest, f"version {version} is gone or not there yet ({self.newest})"
        if version != self._shown:
            self.buffers.point(self._parameters, self._buffer(version))
            self._shown = version

    @contextmanager
    def update(self) -> Iterator[None]:
        """The optimizer's step runs inside: it writes the next version over the one before the newest, which nobody needs."""
        self.show(self.newest)
        target = self._buffer(self.newest + 1)
        self.refill(self._buffer(self.newest), target)
        # An in-place step counts up the version that autograd compares in backward. What was saved of these parameters is in
        # the other buffer, which is not written to.
        with ExitStack() as counters:
            for parameter in self._parameters:
                counters.enter_context(_unsafe_preserve_version_counter(parameter))
            self.buffers.point(self._owners(), target)
            yield
        self.newest += 1
        self._shown = self.newest

    def refill(self, source: int, target: int) -> None:
        """Copy one buffer's bytes over the other's."""
        self.buffers.copy(source, target)

    def start_anew(self) -> None:
        """Count versions from the newest one. Nothing may be in flight."""
        self.show(self.newest)
        self._first_buffer, self.newest, self._shown = self._buffer(self.newest), 0, 0

    def _buffer(self, version: int) -> int:
        return buffer_of(version + self._first_buffer)
