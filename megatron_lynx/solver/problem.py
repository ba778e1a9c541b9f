"""What one stage asks of a solver.

    StageProblem
      ├── attention   every layer's attention half       Option, Option, ...   and for each the Seat its replay has
      ├── mlp         the MLP halves but the last
      ├── last_mlp    the stage's last MLP half: no backward of this stage comes before it
      └── in_flight, budget_bytes

An option is a set of replayed items with what follows from it. A seat is where that replay runs and how much of it the window
there hides. Seconds and bytes are those of one micro-batch on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_lynx.cost.memory import HalfMemory

ON_DEMAND_NAME = "on_demand"


@dataclass(frozen=True)
class Seat:
    """Where a half is replayed. `steady` and `cooldown` name a window for each phase; they may be the same."""

    steady: str
    cooldown: str
    steady_s: float = 0.0
    """Length of the window in the steady phase; 0 on demand."""
    cooldown_s: float = 0.0
    steady_share: float = 1.0
    """The part of the micro-batches whose backward is steady."""
    gather: str | None = None
    """Behind which collective the replay's input is gathered (sequence parallelism)."""
    gather_s: float = 0.0
    """Seconds of that gather which nothing hides."""

    def exposed_s(self, replay_s: float, interference: float) -> float:
        """Seconds of a replay that the windows leave over, mean over the phases. In one it runs `interference` times longer."""
        steady = max(0.0, replay_s - self.steady_s / interference)
        cooldown = max(0.0, replay_s - self.cooldown_s / interference)
        return self.steady_share * steady + (1 - self.steady_share) * cooldown + self.gather_s


ON_DEMAND_SEAT = Seat(ON_DEMAND_NAME, ON_DEMAND_NAME)


@dataclass(frozen=True)
class Option:
    """One choice for one half."""

    replay: tuple[str, ...]
    memory: HalfMemory
    seat: Seat
    replay_s: float
    exposed_s: float
    flops: int

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.replay_s - self.exposed_s)


@dataclass(frozen=True)
class StageProblem:
    """One stage. `budget_bytes` bounds what its layers hold at once; without one the least memory is wanted."""

    stage: int
    layers: int
    attention: Sequence[Option]
    mlp: Sequence[Option]
    last_mlp: Sequence[Option]
    in_flight: int = 1
    budget_bytes: int | None = None
