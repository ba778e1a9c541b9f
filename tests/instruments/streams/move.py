"""One copy of raw memory on a stream of its own: late, and with no right to the memory beyond what the program holds.

    issue          the target is overwritten: whoever reads it before it has waited gets NaN
    on the stream  [1] until somebody waits, mostly; then a while passes
                   [2] a source that nobody holds any more is overwritten: on a GPU the next tensor would lie there
                   [3] the bytes are moved

A GPU's copy holds neither tensor. Here both are held, so that the process survives; what is asked is whether anybody else does.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import final

import torch
from torch import Tensor

NAN = 0xFF
"""In every byte of a floating-point number."""


@final
class Move:
    """One copy. `what`: says which, with the place that asked for it."""

    def __init__(self, target: Tensor, source: Tensor, what: str, delay_s: float) -> None:
        assert all(tensor.is_contiguous() for tensor in (target, source)), f"{what} is not of contiguous memory"
        assert (target.dtype, target.nbytes) == (source.dtype, source.nbytes), f"{what} is more than moving bytes"
        self.target, self.source = target.detach(), source.detach()
        self.what = what
        self.may_begin = threading.Event()
        self.over = False
        self.found: list[str] = []
        """What was wrong, as far as this run shows it."""
        self._delay_s = delay_s

    def run(self) -> None:
        """On the stream's thread."""
        poison(self.target)
        self.may_begin.wait()
        time.sleep(self._delay_s)  # [1]
        if unheld(self.source):
            self.found.append(f"{self.what} reads memory that was let go before the copy was over")
            poison(self.source)  # [2]
        if unheld(self.target):
            self.found.append(f"{self.what} writes memory that was let go before the copy was over")
        ctypes.memmove(self.target.data_ptr(), self.source.data_ptr(), self.target.nbytes)  # [3]
        self.over = True

    def let_go_early(self) -> str | None:
        """Which of its tensors nobody else holds any more, if there is one."""
        return "reads" if unheld(self.source) else "writes" if unheld(self.target) else None

    def touches(self, tensor: Tensor) -> bool:
        """Whether it reads or writes the storage of a tensor."""
        storage = tensor.untyped_storage()._cdata
        return storage in (self.source.untyped_storage()._cdata, self.target.untyped_storage()._cdata)


def poison(tensor: Tensor) -> None:
    """NaN into all its bytes."""
    ctypes.memset(tensor.data_ptr(), NAN, tensor.nbytes)


OURS = 2
"""References to a storage that are none of the program's: a move's tensor, and the one that asks."""


def unheld(tensor: Tensor) -> bool:
    """Whether only a move holds the storage of its tensor."""
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= OURS)
