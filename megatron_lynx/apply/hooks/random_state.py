"""Saves and restores Megatron's random states: the default generators and the tracker of the model-parallel ones (no hook).

The tracker's states are restored as a *copy* of its dict, together with the name of the state in use (rule R13). A state of the
usual tracker is a tensor. One of the graph-safe tracker (`--te-rng-tracker`, and with captured graphs Megatron's own) is a
generator, to which graphs refer: only its content is restored, and which one is in use.

Megatron's NVTX ranges are restored as well: a recomputation stops between a push and its pop, so ranges pushed since are popped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_lynx.runtime.device import Device
from megatron_lynx.runtime.surroundings import RandomSource

_NAME = "_current_state_name"
"""The tracker's attribute that names the state in use. Transformer Engine's tracker has none."""


class Tracked(NamedTuple):
    state: Any
    value: torch.Tensor


class RandomState(NamedTuple):
    default: tuple[torch.Tensor, ...]
    tracked: dict[str, Tracked]
    name: str | None
    in_use: Any


class MegatronRandom(RandomSource):
    """torch's generators and Megatron's tracker, which is looked up each time, because `force_reset_rng` replaces it."""

    def __init__(self, device: Device | None = None) -> None:
        from megatron.core.tensor_parallel import random

        super().__init__(device)
        self._megatron: Any = random

    def capture(self) -> RandomState:
        tracker = self._megatron.get_cuda_rng_tracker()
        tracked = {
            name: Tracked(state, state if isinstance(state, torch.Tensor) else state.get_state())
            for name, state in tracker.get_states().items()
        }
        graph_safe = any(tracked_state.state is not tracked_state.value for tracked_state in tracked.values())
        in_use = self._megatron._get_cuda_rng_state(graph_safe=True) if graph_safe else None
        return RandomState(super().capture(), tracked, getattr(tracker, _NAME, None), in_use)

    def restore(self, state: RandomState) -> None:
        if state.in_use is not None:
            self._megatron._set_cuda_rng_state(state.in_use, graph_safe=True)
        super().restore(state.default)
        for tracked_state in state.tracked.values():
            if tracked_state.state is not tracked_state.value:
                tracked_state.state.set_state(tracked_state.value)
        tracker = self._megatron.get_cuda_rng_tracker()
        tracker.set_states({name: tracked_state.state for name, tracked_state in state.tracked.items()})
        if state.name is not None:
            setattr(tracker, _NAME, state.name)

    def same(self, one: RandomState, other: RandomState) -> bool:
        return (
            one.name == other.name
            and one.tracked.keys() == other.tracked.keys()
            and all(torch.equal(tracked_state.value, other.tracked[name].value) for name, tracked_state in one.tracked.items())
            and super().same(one.default, other.default)
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
