"""Where the replay of each half of a stage's layers may run, and how long the window there is.

    without sequence parallelism     mlp(L) backward [all-reduce]   attention(L) backward [all-reduce]   mlp(L-1) ...
                                            replay attention(L)            replay mlp(L-1)

    with it, a half's own first collective gathers its gradient, and of the half only a dropout mask is needed before: the
    replay may run there, or behind the last collective of the half before. An input that is gathered once is gathered
    behind the first collective of the half before.

The stage's last MLP half has no half before it. On the last stage its forward has only just run. On the others it is replayed
while the forward of a later micro-batch waits (steady), or while its gradient is received (cool-down: the stages behind still
run a forward between two backwards, so that wait is about a forward long).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import gather_once_s, window_lengths_s
from megatron_lynx.cost.layer import LayerShape
from megatron_lynx.cost.stage import phases_of, stage_seconds
from megatron_lynx.items import COLUMN_PARALLEL, Half
from megatron_lynx.schedule.windows import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.solver.problem import ON_DEMAND_SEAT, Seat

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import LinkKind, Profile

Place = Literal["attention", "mlp", "last_mlp"]
"""A kind of half: halves of one kind have the same windows."""


def half_of(place: Place) -> Half:
    return "attention" if place == "attention" else "mlp"


BEFORE: dict[Half, tuple[Half, str]] = {"attention": ("mlp", ""), "mlp": ("attention", "+1")}
"""The half whose backward comes before that of each half, and how a window's name says in which layer it is."""


@dataclass(frozen=True)
class Seats:
    """The seats of one stage of a job."""

    job: Job
    profile: Profile
    stage: int

    def of(self, place: Place, replay: Collection[str]) -> Seat:
        """The seat of a half that replays these items."""
        if not replay:
            return ON_DEMAND_SEAT
        half = half_of(place)
        gathers = self.gathers(half, replay)
        windows = self._own(half, replay)
        if place == "last_mlp":
            if gathers or not windows:
                return self._from_outside(gathers)
        elif self.job.parallel.tensor > 1:
            windows |= self._before(half)
        else:
            return ON_DEMAND_SEAT
        name = max(windows, key=lambda name: (windows[name], name == f"bwd.{half}.0"))
        if not gathers:
            return Seat(name, name, windows[name], windows[name])
        before, above = BEFORE[half]
        gather_s = gather_once_s(self.profile, half, before, self._message_bytes)
        return Seat(name, name, windows[name], windows[name], gather=f"bwd.{before}.0{above}", gather_s=gather_s)

    def gathers(self, half: Half, replay: Collection[str]) -> bool:
        """Whether the replay calls a GEMM whose input is gathered once."""
        return self.job.parallel.sequence_parallel and COLUMN_PARALLEL[half] in replay

    def _own(self, half: Half, replay: Collection[str]) -> dict[str, float]:
        """The window of a half's own backward that comes before anything of it is needed. A dropout mask is needed first."""
        in_time = self.job.parallel.sequence_parallel and f"{half}_bda" not in replay
        return {f"bwd.{half}.0": self._lengths("bwd", half)[0]} if in_time else {}

    def _before(self, half: Half) -> dict[str, float]:
        """The last window of the half before: it then holds nothing but its inputs any more."""
        before, above = BEFORE[half]
        lengths = self._lengths("bwd", before)
        return {f"bwd.{before}.{len(lengths) - 1}{above}": lengths[-1]}

    def _from_outside(self, gathers: bool) -> Seat:
        """Of the last MLP half: windows that are in no backward of this stage, or none."""
        if gathers:
            gather_s = gather_once_s(self.profile, "mlp", None, self._message_bytes)
            return Seat(ON_DEMAND, ON_DEMAND, gather=ON_DEMAND, gather_s=gather_s)
        if self.stage == self.job.parallel.pipeline - 1:
            return ON_DEMAND_SEAT
        received = self._p2p_s + stage_seconds(self.job, self.profile, self.stage + 1, self._message_bytes).forward_s
        share = phases_of(self.job, self.stage).steady_share
        if self.job.parallel.tensor == 1:
            return Seat(RECV_BACKWARD, RECV_BACKWARD, self._p2p_s, received, share)
        return Seat("fwd.mlp.0", RECV_BACKWARD, self._lengths("fwd", "mlp")[0], received, share)

    def _lengths(self, passing: Literal["fwd", "bwd"], half: Half) -> tuple[float, ...]:
        return window_lengths_s(self.profile, passing, half, self._message_bytes)

    @property
    def _message_bytes(self) -> int:
        return LayerShape(self.job.model, self.job.parallel, self.job.batch.micro).gathered_bytes

    @property
    def _p2p_s(self) -> float:
        kind: LinkKind = "p2p"
        shape = LayerShape(self.job.model, self.job.parallel, self.job.batch.micro)
        return self.profile.link_s(kind, shape.input_bytes)
