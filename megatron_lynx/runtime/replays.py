"""Regenerating frames: ahead of time by a window's tasks, or when backward asks for the first tensor of one.

take(handle) ─── nothing there yet: replay(frame, "on_demand") ───> the tensor, dropped here
a window     ─── replay(frame, window), or a part of it: replay(frame, window, until)
behind one   ─── gather(frame): up to the site whose input is gathered; the next replay runs it with what arrived
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.anatomy.address import ON_DEMAND
from megatron_lynx.runtime.context import Context
from megatron_lynx.runtime.frame import Frame, Handle
from megatron_lynx.runtime.progress import Progress
from megatron_lynx.runtime.refusals import asked_twice, second_order
from megatron_lynx.runtime.replay import Replayer
from megatron_lynx.runtime.rng import RandomSource

Guard = Callable[[], AbstractContextManager[Any]]
AsRecorded = Callable[[int], AbstractContextManager[None]]
"""From a micro-batch's index to where its weights are in place (`runtime.overlapping`)."""


class Replays:
    """All replays of one engine. Each runs inside `guard`, with the weights as recorded."""

    def __init__(
        self, progress: Progress, random: RandomSource, guard: Guard, as_recorded: AsRecorded, surroundings: Context
    ) -> None:
        self._progress = progress
        self._random = random
        self._guard = guard
        self._as_recorded = as_recorded
        self._surroundings = surroundings

    def take(self, handle: Handle) -> Tensor:
        """The tensor that backward asks for, which is replayed now if no window did that. It is handed over for good.

        Raises `ReplayError` when it is asked for again.
        """
        frame = handle.frame
        if torch.is_grad_enabled():
            raise second_order(frame.policy.name)
        if not frame.replayed and frame.lets_go:
            self.replay(frame, ON_DEMAND)
            self._progress.counts.on_demand += 1
        found = frame.found.pop(handle.key, None)
        if found is None:
            raise asked_twice(frame.policy.name)
        return found

    def replay(self, frame: Frame, window: str, until: str | None = None) -> None:
        """Make again what was let go, or the part of it that comes before the item `until`. `window`: where, for the trace."""
        begin, clocked = self._progress.trace.now(), self._progress.clock.begin()
        if self.would_gather(frame, until):
            self.gather(frame)
        if frame.wanted:
            self._run(frame, until)
        self._progress.clock.end(window, clocked)
        self._progress.add_span("replay", frame, window, begin)
        if not frame.wanted:
            frame.give_up_inputs()
        elif until is None:
            raise AssertionError(f"the replay of {frame.policy.name} did not regenerate {sorted(frame.wanted)}")

    def would_gather(self, frame: Frame, until: str | None) -> bool:
        """Whether such a replay comes to a site whose input is still to be gathered."""
        site, section = frame.policy.gather_site, frame.policy.section
        return site is not None and frame.gathering is None and (until is None or section.index(until) > section.index(site))

    def gather(self, frame: Frame) -> None:
        """Replay the half up to the site whose input is gathered, and start gathering it into a buffer of the frame."""
        policy = frame.policy
        argument = self._run(frame, policy.gather_site)
        assert argument is not None, f"{policy.name} never reached {policy.gather_site}"
        assert policy.gather is not None, f"{policy.name} has a gather site and no way to gather"
        frame.gathering = policy.gather(argument)
        self._progress.counts.gathered += 1

    def _run(self, frame: Frame, until: str | None) -> Tensor | None:
        replayer = Replayer(frame, self._random, until)
        weights = self._as_recorded(frame.micro_batch.index)
        guard = nullcontext() if frame.shortcut else self._guard()
        silent = nullcontext() if frame.shortcut else frame.policy.hooks.silent()
        with guard, silent, weights, self._surroundings.as_captured(frame.surroundings):
            return self._progress.run(replayer)  # type: ignore[no-any-return]
