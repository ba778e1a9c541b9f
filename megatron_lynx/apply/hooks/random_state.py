"""Megatron's random states: the default generators and the tracker of the model-parallel ones (no hook: it is only read and set).

The tracker's states are restored as a *copy* of its dict, together with the name of the state in use: a fork inside a fork
would otherwise draw other numbers in the replay (rule R13).

Megatron's NVTX ranges around a replay are put back as well (no hook): a replay stops early, between a push and its pop. What was
pushed since is popped, so that the next pop finds its own message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.surroundings import TorchRandom

RandomState = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor], str | None]

_NAME = "_current_state_name"
"""The tracker's attribute that names the state in use. 0.15's has none."""


class MegatronRandom:
    """A `RandomSource` over torch's generators and Megatron's tracker.

    The tracker is looked up each time: seeding anew with `force_reset_rng` makes another one.
    """

    def __init__(self, device: Device | None = None) -> None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        self._present_tracker: Callable[[], Any] = get_cuda_rng_tracker
        self._torch = TorchRandom(device)

    def capture(self) -> RandomState:
        tracker = self._present_tracker()
        return self._torch.capture(), tracker.get_states(), getattr(tracker, _NAME, None)

    def restore(self, state: RandomState) -> None:
        default, tracked, name = state
        self._torch.restore(default)
        tracker = self._present_tracker()
        tracker.set_states(dict(tracked))
        if name is not None:
            setattr(tracker, _NAME, name)

    def same(self, one: RandomState, other: RandomState) -> bool:
        return (
            one[2] == other[2]
            and one[1].keys() == other[1].keys()
            and all(torch.equal(state, other[1][name]) for name, state in one[1].items())
            and self._torch.same(one[0], other[0])
        )


@contextmanager
def left_as_they_were() -> Iterator[None]:
    from megatron.core import utils

    depth = len(utils._nvtx_range_messages)
    try:
        yield
    finally:
        while len(utils._nvtx_range_messages) > depth:
            utils.nvtx_range_pop(utils._nvtx_range_messages[-1])
