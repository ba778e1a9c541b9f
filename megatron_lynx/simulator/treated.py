"""One layer half as the simulator sees it: what a plan makes of it, with its seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import Window, WindowAddress
from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds
from megatron_lynx.cost.memory import HalfMemory
from megatron_lynx.schedule.schedule import Phase


@dataclass(frozen=True)
class Treated:
    """What becomes of one half: where its replay runs by phase, how long it takes, what it holds."""

    layer: int
    section: Section
    """What fills the half."""
    memory: HalfMemory
    replay_s: float = 0.0
    """Seconds of its replay; 0 for a half that is kept."""
    steady: Window = "on_demand"
    cooldown: Window = "on_demand"
    gather_s: float = 0.0
    """Seconds by which gathering the replay's input delays it."""
    gathered_bytes: int = 0
    """The part of what is regenerated that is the gathered input, which is there first."""
    host: HostSeconds = NO_HOST_TIME
    """How long the host takes to issue it. Its replay is issued with its backward, wherever it runs."""

    @property
    def half(self) -> Half:
        return self.section.half

    @property
    def replayed(self) -> bool:
        return self.replay_s > 0 or self.memory.regenerated > 0

    def window(self, phase: Phase) -> Window:
        """Where the replay runs for a backward of this phase. Behind a forward that hides nothing it is on demand instead."""
        window = self.cooldown if phase == "cooldown" else self.steady
        missed = phase == "warmup" and isinstance(window, WindowAddress) and window.passing == "fwd"
        return "on_demand" if missed else window
