"""Regenerating frames: ahead of time in a window, or when backward asks for the first tensor of one.

take(handle) ─── nothing there yet: replay(frame, "on_demand") ───> the tensor, dropped here
a window     ─── replay(frame, window)
behind one   ─── gather(frame): up to the site whose input is gathered; the later replay runs with what arrived
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.runtime.context import Context
from megatron_lynx.runtime.frame import Frame, Handle
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.refusals import second_order
from megatron_lynx.runtime.replay import Replayer
from megatron_lynx.runtime.rng import RandomSource

Guard = Callable[[], AbstractContextManager[Any]]
AsRecorded = Callable[[int], AbstractContextManager[None]]
"""From a micro-batch's index to where its weights are in place (`runtime.overlapping`)."""


class Replays:
    """Of one engine. Every replay runs inside `guard`, with the weights as recorded."""

    def __init__(
        self, progress: Progress, random: RandomSource, guard: Guard, as_recorded: AsRecorded, surroundings: Context
    ) -> None:
        self._progress = progress
        self._random = random
        self._guard = guard
        self._as_recorded = as_recorded
        self._surroundings = surroundings

    def take(self, handle: Handle) -> Tensor:
        """What backward asks for."""
        if torch.is_grad_enabled():
            raise second_order(handle.frame.policy.name)
        if handle.frame.lets_go:
            self.replay(handle.frame, "on_demand")
            self._progress.counts.on_demand += 1
        return handle.take()

    def replay(self, frame: Frame, window: str) -> None:
        """Make again what was let go. `window`: where, for the trace."""
        with self._progress.span("replay", frame, window):
            if frame.policy.gather_site is not None and frame.gathering is None:
                self.gather(frame)
            if frame.wanted:
                self._run(Replayer(frame, self._random))
        if frame.wanted:
            raise AssertionError(f"the replay of {frame.policy.name} did not regenerate {sorted(frame.wanted)}")
        frame.give_up_inputs()

    def gather(self, frame: Frame) -> None:
        """Run the half up to the site whose input is gathered, and start gathering it into a buffer of the frame."""
        up_to = Replayer(frame, self._random, up_to_gather=True)
        self._run(up_to)
        assert up_to.to_gather is not None, f"{frame.policy.name} never reached {frame.policy.gather_site}"
        assert frame.policy.gather is not None, f"{frame.policy.name} has a gather site and no way to gather"
        frame.gathering = frame.policy.gather(up_to.to_gather)
        self._progress.counts.gathered += 1

    def _run(self, replayer: Replayer) -> None:
        frame = replayer.frame
        weights = self._as_recorded(frame.micro_batch.index)
        with self._progress.inside(replayer), self._guard(), weights, self._surroundings.as_captured(frame.surroundings):
            replayer.run()
