"""Random-number states: a replay must draw what its forward drew, and leave no trace.

    forward   ──[S0]── site ──[S1]── kept site ──[S2]── site ──
                 │                               │
    replay    restore(S0)    …    the kept site is skipped: restore(S2)    …    restore what was before the replay

A half that cannot draw, because nothing in it drops out, has none of this (`HalfPolicy.may_draw`).

What a state consists of depends on who trains: `TorchRandom` knows torch's default generators; Megatron's tracker is added
by `apply` (rule R13: a copy of its dict, and the name of the state in use).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lynx.runtime.device import Device, present_device


class RandomSource(Protocol):
    """Everything that draws random numbers in a layer."""

    def capture(self) -> Any:
        """The present state, as a value that later draws do not change."""

    def restore(self, state: Any) -> None:
        """Make `state` the present one. The same state can be restored again."""

    def same(self, one: Any, other: Any) -> bool:
        """Whether nothing was drawn between two captures."""


class TorchRandom:
    """The default generators of torch that code on a device draws from: the CPU's, and on CUDA that of the device."""

    def __init__(self, device: Device | None = None) -> None:
        self._device = device or present_device()

    def capture(self) -> tuple[Tensor, ...]:
        return self._device.random_states()

    def restore(self, state: tuple[Tensor, ...]) -> None:
        self._device.restore_random_states(state)

    def same(self, one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
        return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@contextmanager
def drawing_from(source: RandomSource, state: Any) -> Iterator[None]:
    """Inside, numbers are drawn from `state` on; what is drawn is undone at the end."""
    before = source.capture()
    try:
        source.restore(state)
        yield
    finally:
        source.restore(before)
