"""Where the replay of a half runs, and how much of it is then exposed.

    Seat
      ├── steady      Placement: Portion, Portion, ...    for backwards that follow a forward
      ├── cooldown    Placement                           for backwards that follow another backward
      └── gather      behind which collective the replay's input is gathered, if it is (sequence parallelism)

A portion is a window with the seconds of it that this replay may use. A placement without portions is on demand: the replay runs
when backward asks for its first tensor, and nothing hides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_lynx.anatomy import Half
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD, is_forward
from megatron_lynx.anatomy.in_time import own_window


class Portion(NamedTuple):
    """The part of a window that one replay may use."""

    window: str
    seconds: float


class Placement(tuple[Portion, ...]):
    """The portions of windows in which a half is replayed, in the order in which they come."""

    __slots__ = ()

    @classmethod
    def in_window(cls, window: str, seconds: float) -> Placement:
        """All of one window, which hides no other replay."""
        return cls((Portion(window, seconds),))

    @property
    def on_demand(self) -> bool:
        return not self

    @property
    def seconds(self) -> float:
        """How long its windows are together."""
        return sum(portion.seconds for portion in self)

    @property
    def window(self) -> str:
        """What a plan file says, which has one name for each phase."""
        if not self:
            return ON_DEMAND
        (portion,) = self
        return portion.window

    @property
    def in_receive(self) -> bool:
        """Whether some of it runs while the stage waits for the gradient."""
        return any(portion.window == RECV_BACKWARD for portion in self)

    @property
    def early(self) -> bool:
        """Whether what is regenerated exists before the stage's backward begins."""
        return self.in_receive or any(is_forward(portion.window) for portion in self)

    def ahead(self, half: Half) -> bool:
        """Whether what this half regenerates exists while the half before it still runs backward."""
        return not self.early and any(portion.window != own_window(half) for portion in self)


NOWHERE = Placement()


@dataclass(frozen=True)
class Seat:
    """Where one half of a layer is replayed, in both phases of a step."""

    steady: Placement = NOWHERE
    cooldown: Placement = NOWHERE
    steady_share: float = 1.0
    """The part of the micro-batches whose backward is steady."""
    gather: str | None = None
    gather_s: float = 0.0
    """Seconds of that gather which nothing hides."""

    def exposed_s(self, replay_s: float, interference: float) -> float:
        """Seconds of a replay that its windows do not hide, the mean over both phases.

        In a window it runs `interference` times longer than alone.
        """
        steady = max(0.0, replay_s - self.steady.seconds / interference)
        cooldown = max(0.0, replay_s - self.cooldown.seconds / interference)
        return self.steady_share * steady + (1 - self.steady_share) * cooldown + self.gather_s


ON_DEMAND_SEAT = Seat()
