"""One pass of a stage as it is written down: a clock, and what happens at which time.

compute ──> (window: replays, then the rest of the wait) ──> compute ──> ...        the clock moves
               └ taken, given back: bytes                                           spans and memory steps stay
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from megatron_lynx.anatomy.address import ON_DEMAND, WindowAddress
from megatron_lynx.simulator.passes import TimedPass
from megatron_lynx.simulator.timeline import Span
from megatron_lynx.simulator.treated import Part, Treated


class Walk:
    """Begins `start_s` after the pass does. Under a collective a replay takes `interference` times longer."""

    def __init__(self, interference: float, start_s: float = 0.0) -> None:
        self.clock_s = start_s
        self._interference = interference
        self._spans: list[Span] = []
        self._memory: list[tuple[float, int]] = []
        self._regenerated: list[tuple[float, int]] = []
        self._hidden_s = self._exposed_s = 0.0

    def compute(self, seconds: float) -> None:
        self.clock_s += seconds

    def hold(self, change_bytes: int, *, regenerated_bytes: int = 0) -> None:
        """Takes bytes or, below 0, gives them back. `regenerated_bytes`: how many of them are what replays made."""
        if change_bytes:
            self._memory.append((self.clock_s, change_bytes))
        if regenerated_bytes:
            self._regenerated.append((self.clock_s, regenerated_bytes))

    def regenerate(self, change_bytes: int) -> None:
        self.hold(change_bytes, regenerated_bytes=change_bytes)

    def replay(self, half: Treated, seconds: float, window: str) -> None:
        """Runs so much of a half's replay; `window` is where it is drawn: what no window hides counts as on demand."""
        if seconds:
            start_s, self.clock_s = self.clock_s, self.clock_s + seconds
            self._span("replay", start_s, half, window)

    def on_demand(self, part: Part) -> None:  # [1]
        if part.gather_s:
            start_s, self.clock_s = self.clock_s, self.clock_s + part.gather_s
            self._span("gather", start_s, part.half)
        self.regenerate(part.taken_bytes)
        self.replay(part.half, part.seconds, ON_DEMAND)
        self._exposed_s += part.seconds + part.gather_s

    def window(self, window: WindowAddress, seconds: float, served: Sequence[Part]) -> None:  # [2]
        start_s, room_s = self.clock_s, seconds / self._interference
        for part in served:
            self.regenerate(part.taken_bytes)
            fits_s = min(part.seconds, room_s)
            room_s -= fits_s
            self.replay(part.half, fits_s * self._interference, str(window))
            self.replay(part.half, part.seconds - fits_s, ON_DEMAND)
            self._hidden_s += fits_s
            self._exposed_s += part.seconds - fits_s + part.gather_s
        self.clock_s = max(self.clock_s, start_s + seconds) + sum(part.gather_s for part in served)
        if self.clock_s > start_s:
            self._spans.append(Span("window", start_s, self.clock_s, window.layer, window.half, None, str(window), str(window)))

    def half(self, kind: Literal["forward", "backward"], start_s: float, half: Treated) -> None:
        self._span(kind, start_s, half)

    def over(self) -> TimedPass:
        return TimedPass(
            self.clock_s,
            self._hidden_s,
            self._exposed_s,
            tuple(self._memory),
            tuple(self._spans),
            regenerated=tuple(self._regenerated),
        )

    def _span(
        self, kind: Literal["forward", "backward", "replay", "gather"], start_s: float, half: Treated, window: str | None = None
    ) -> None:
        name = f"{kind} {half.half}({half.layer})"
        self._spans.append(Span(kind, start_s, self.clock_s, half.layer, half.half, None, window, name))
