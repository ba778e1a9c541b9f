"""What there is to say of host time: whether it is known, on which CPU, and which stages wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_lynx.config.host_time import Implementation
from megatron_lynx.cost.host import HostLoad
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.units import format_seconds


@dataclass(frozen=True)
class HostReport:
    """Host time in an answer about a whole step."""

    cpu: str | None
    """What the host time was measured on; None where it is not known."""
    layers: Implementation | None = None
    """Whose layers it was measured of."""
    words: str = ""
    """Both, for people; and where other layers had to be taken, for which."""
    bound: Sequence[HostLoad] = ()
    """The stages that are host-bound."""

    @classmethod
    def of(cls, profile: Profile, bound: Sequence[HostLoad]) -> HostReport:
        """`bound`: what was found with the figures of this profile."""
        known, own = profile.host_time, profile.shape.implementation
        if known is None:
            return cls(None, bound=tuple(bound))
        return cls(known.cpu, known.taken_for(own), known.words_for(own), tuple(bound))

    @property
    def as_json(self) -> dict[str, Any]:
        return {"cpu": self.cpu, "layers": self.layers, "host_bound": [asdict(load) for load in self.bound]}

    @property
    def lines(self) -> list[str]:
        """For a terminal: one line, or one for each stage that is host-bound and what to do about it."""
        if self.cpu is None:
            return ["host time: not known (megatron-lynx profile and doctor measure it); no pass is taken to wait for Python"]
        if not self.bound:
            return [f"host time: Python stays ahead of the device on every stage (host time of {self.words})"]
        stages = [
            f"host-bound: stage {load.stage}: in a step the host needs {format_seconds(load.host_s)} to issue what takes "
            f"the device {format_seconds(load.device_s)}"
            for load in self.bound
        ]
        todo = "hiding replays gains nothing there; a larger batch.micro or a smaller parallel.tensor does"
        return [*stages, f"host time of {self.words}; {todo}"]
