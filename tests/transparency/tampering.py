"""Copies that are late, and memory that is worth nothing once nobody may read it: what is read too early or too late shows.

original let go      ──> overwritten        whoever else still reads it gets NaN
memory to reload to  ──> overwritten        before the copy: who does not wait for it gets NaN
host memory          ──> overwritten        when it was copied back: a second reload would bring NaN
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LONGEST_S = 0.003
NAN = 0xFF
"""In every byte of a floating-point number."""


@contextmanager
def tampered_copies(offloader: Any, seen: Any) -> Iterator[None]:
    """`seen.copies` gets beginnings and ends, `seen.overwritten` counts originals."""
    from megatron_lynx.runtime.offload import OffloadedStorage

    delays = random.Random(5)

    def out(target: Tensor, source: Tensor) -> None:
        _late_copy("out", target, source, target.data_ptr(), delays, seen)

    def back(target: Tensor, source: Tensor) -> None:
        _late_copy("back", target, source, source.data_ptr(), delays, seen)
        source.view(-1).view(torch.uint8).fill_(NAN)

    def letting_go(storage: Any) -> None:
        if storage._original is not None:
            storage._original.untyped_storage().fill_(NAN)
            seen.overwritten += 1
        let_go(storage)

    def fresh_and_overwritten(storage: Any) -> Tensor:
        made = fresh(storage)
        made.untyped_storage().fill_(NAN)
        return made

    let_go, fresh = OffloadedStorage._let_go, OffloadedStorage._fresh
    OffloadedStorage._let_go = letting_go  # type: ignore[method-assign]
    OffloadedStorage._fresh = fresh_and_overwritten  # type: ignore[method-assign]
    offloader.out.move, offloader.back.move = out, back
    try:
        yield
    finally:
        OffloadedStorage._let_go, OffloadedStorage._fresh = let_go, fresh  # type: ignore[method-assign]


def _late_copy(name: str, target: Tensor, source: Tensor, host: int, delays: random.Random, seen: Any) -> None:
    seen.copies.append((f"{name} begins", host))
    time.sleep(delays.uniform(0, LONGEST_S))
    target.copy_(source)
    seen.copies.append((f"{name} ends", host))
