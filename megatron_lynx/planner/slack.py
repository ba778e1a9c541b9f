"""Memory left on a stage for delayed weight gradients, from a backward to the next one.

held   ╲  backward k         ╱ forward      ╲  backward k + 1          budget less bytes held, by moment; an entry that waits
        ╲________.........../                ╲_______                  from one moment to another takes its bytes at every
        └── an entry may wait here ──┘                                 moment between them
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from megatron_lynx.anatomy.address import FrameKey, Window, WindowAddress
from megatron_lynx.plan.plan import Stage
from megatron_lynx.simulator.simulation import Executed, Simulation


class Slack:
    """Bytes left for one chunk, from one of its backwards to the end of the next forward, if there is one."""

    def __init__(
        self, simulation: Simulation, entry: Stage, first_layers: Sequence[int], budget_bytes: int, *, drains: bool = False
    ) -> None:
        """`first_layers`: of all chunks of the stage. `budget_bytes`: of the stage's layers. `drains`: of its first backward in
        cool-down, or else its last."""
        followed = None if drains else next_forward(simulation, entry.stage, entry.chunk)
        backward, behind = followed or _alone(simulation, entry, drains=drains)
        curve = simulation.memory(entry.stage)
        self._moved = first_layers[behind.action.chunk] - entry.layers.first
        first, end = bisect_right(curve.times_s, backward.start_s) - 1, bisect_right(curve.times_s, behind.end_s)
        self.sent_s, self.end_s = backward.end_s, behind.end_s
        self._times_s = list(curve.times_s[first:end])
        self._left = budget_bytes - np.array(curve.bytes[first:end], dtype=np.int64)
        self._taken = np.zeros_like(self._left)
        self._halves: dict[tuple[str, FrameKey], tuple[float, float]] = {}
        self._windows: dict[str, float] = {}
        for execution in (backward, behind):
            self._enter(execution)

    def _enter(self, execution: Executed) -> None:
        for span in execution.content.spans:
            start_s, end_s = execution.start_s + span.start_s, execution.start_s + span.end_s
            if span.kind == "window":
                self._windows[span.name] = start_s
            elif span.layer is not None and span.half is not None:
                self._halves[span.kind, (span.layer, span.half)] = start_s, end_s  # type: ignore[index]

    def begins_s(self, half: FrameKey) -> float:
        return self._halves["backward", half][0]

    def opens_s(self, window: Window) -> float:
        """Time at which a wait is reached; the end of its half if it takes no time."""
        if not isinstance(window, WindowAddress):
            return self.end_s
        if window.passing == "bwd":
            return self._windows.get(str(window), self._halves["backward", window.frame][1])
        window = window._replace(layer=window.layer + self._moved)  # the forward may be another chunk's
        return self._windows.get(str(window), self._halves.get(("forward", window.frame), (0.0, self.end_s))[1])

    def takes(self, size_bytes: int, from_s: float, until_s: float) -> bool:
        """Take bytes between two times if they fit; return whether they do."""
        chosen = self._between(from_s, until_s)
        if self._left[chosen].min(initial=size_bytes) < size_bytes:
            return False
        self._take(chosen, size_bytes)
        return True

    def gives_back(self, size_bytes: int, from_s: float, until_s: float) -> None:
        self._take(self._between(from_s, until_s), -size_bytes)

    @property
    def most_taken_bytes(self) -> int:
        return int(self._taken.max(initial=0))

    def _take(self, chosen: slice, size_bytes: int) -> None:
        self._left[chosen] -= size_bytes
        self._taken[chosen] += size_bytes

    def _between(self, from_s: float, until_s: float) -> slice:
        return slice(max(0, bisect_right(self._times_s, from_s) - 1), bisect_right(self._times_s, until_s))


def next_forward(simulation: Simulation, stage: int, chunk: int) -> tuple[Executed, Executed] | None:
    """Return a backward of a chunk that is followed by a forward of any chunk, with that forward; None if there is none."""
    passes = [execution for execution in simulation.executed[stage] if execution.action.is_pass]
    kinds = ("B", chunk), "F"
    pairs = [pair for pair in pairwise(passes) if (pair[0].action[1:], pair[1].action.kind) == kinds]
    return pairs[len(pairs) // 2] if pairs else None


def _alone(simulation: Simulation, entry: Stage, *, drains: bool) -> tuple[Executed, Executed]:
    """The first backward of a chunk that no forward follows. `drains`: in cool-down, or the last one."""
    backwards = [
        execution
        for execution in simulation.holding(entry.stage)
        if execution.action.kind == "B" and execution.action.chunk == entry.chunk
    ]
    in_cooldown = (execution for execution in backwards if execution.phase == "cooldown")
    backward = next(in_cooldown, backwards[-1]) if drains else backwards[0]
    return backward, backward
