"""The windows of its own stage's backward in which a half may be replayed, and how long they are.

    backward, from the last layer      mlp(L) [bwd.mlp.last]   attention(L) [bwd.attention.last]   mlp(L-1) ...
                                        replay attention(L)     replay mlp(L-1)                                               [1]
    with sequence parallelism          [bwd.X.0] X ...                a half's own replay, before its GEMMs                   [2]

[1] The last window of the half before: by then that half holds nothing but its inputs.
[2] `anatomy.in_time` says when that window comes before anything of the half is needed.
An input that is gathered once for its replay is gathered behind the first collective of the half before. Every window has one
half to hide, so no two replays share one. A window without length is not offered. A replay that communicates runs on demand: in
FP8 with one scale for all ranks' parts of a norm's output, that of a norm reduces its amax (rule R2). Forwards and the receive of
the gradient have windows, too: `solver.stage_seats`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from megatron_lynx.anatomy import DENSE, HALVES, PASSES, Half, Pass, Section
from megatron_lynx.anatomy.address import ON_DEMAND, window_name
from megatron_lynx.anatomy.in_time import half_before, own_windows_in_time
from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import gather_once_s, window_lengths_s
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.solver.placement import NOWHERE, ON_DEMAND_SEAT, Placement, Seat


@dataclass(frozen=True)
class HalfKind:
    """What decides which windows a half has: what fills it, and what fills the half whose backward comes before its own."""

    section: Section
    before: Section | None
    """None for the stage's last half, whose backward comes first."""

    @property
    def half(self) -> Half:
        return self.section.half

    @property
    def last(self) -> bool:
        return self.before is None

    @property
    def windows_before(self) -> bool:
        """Whether the half before has windows. An opaque section has none."""
        return self.before is not None and not self.before.opaque


@dataclass(frozen=True)
class Seats:
    """The seats that all stages of a job have in common."""

    job: Job
    profile: Profile

    def everywhere(self, kind: HalfKind, replay: Collection[str], backward: Sequence[Placement]) -> tuple[Seat, ...]:
        """Those that every stage has, beginning with the one on demand. `backward`: what `backward()` says of this half."""
        if not replay:
            return (ON_DEMAND_SEAT,)
        communicates = self.communicates(kind, replay)
        placements = [NOWHERE, *(() if communicates else backward)]
        if not self.gathers(kind, replay):
            return tuple(Seat(placement, placement) for placement in placements)
        if communicates or not kind.windows_before:
            return (Seat(gather=ON_DEMAND, gather_s=self._gathers_s[kind.half, None]),)
        before, above = half_before(kind.half)
        gather, gather_s = window_name("bwd", before, 0, above), self._gathers_s[kind.half, before]
        return tuple(Seat(placement, placement, gather=gather, gather_s=gather_s) for placement in placements)

    def gathers(self, kind: HalfKind, replay: Collection[str]) -> bool:
        """Whether the replay calls a GEMM whose input is gathered once."""
        return self.job.parallel.sequence_parallel and kind.section.column_parallel in replay

    def communicates(self, kind: HalfKind, replay: Collection[str]) -> bool:
        """Whether the replay makes a norm anew that reduces its amax."""
        return self.job.reduces_amaxes and kind.section.norm in replay

    def backward(self, kind: HalfKind, replay: Collection[str]) -> list[Placement]:
        """The windows of the stage's backward that come before anything of the half is needed, the longest first."""
        sequence_parallel, te = self.job.parallel.sequence_parallel, self.job.model.uses_te
        in_time = own_windows_in_time(kind.section, replay, sequence_parallel=sequence_parallel, te=te)
        own = self._windows["bwd", kind.half, 0][:in_time]  # [2]
        before = self._windows[("bwd", *half_before(kind.half))][-1:] if kind.windows_before else []  # [1]
        return sorted((window for window in own + before if window.seconds > 0), key=lambda window: -window.seconds)

    def forward(self, half: Half) -> list[Placement]:
        """The longest window of the half's own forward, if there is any; of equals the last: until there nothing more is held."""
        windows = [window for window in self._windows["fwd", half, 0] if window.seconds > 0]
        return [max(reversed(windows), key=lambda window: window.seconds)] if windows else []

    @cached_property
    def _windows(self) -> dict[tuple[Pass, Half, int], list[Placement]]:
        """All windows of a half in one pass, by how many layers it is above the half that is replayed."""
        return {
            (passing, half, above): [
                Placement.in_window(window_name(passing, half, ordinal, above), seconds)
                for ordinal, seconds in enumerate(window_lengths_s(self.profile, passing, DENSE[half], self.shape.gathered_bytes))
            ]
            for passing, half, above in product(PASSES, HALVES, (0, 1))
        }

    @cached_property
    def _gathers_s(self) -> dict[tuple[Half, Half | None], float]:
        """Exposed seconds by the half whose input is gathered, and by the half behind whose first collective that happens."""
        behind: list[tuple[Half, Half | None]] = [(half, other) for half in HALVES for other in (None, half_before(half)[0])]
        return {
            (half, other): gather_once_s(self.profile, DENSE[half], DENSE[other] if other else None, self.shape.gathered_bytes)
            for half, other in behind
        }

    @cached_property
    def p2p_s(self) -> float:
        """Seconds of one message between stages."""
        return self.profile.link_s("p2p", self.shape.input_bytes)

    @cached_property
    def shape(self) -> LayerShape:
        return LayerShape.of(self.job)
