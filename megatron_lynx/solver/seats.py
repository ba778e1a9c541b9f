"""Where the replay of each half of a stage's layers may run, and how long the window there is.

    forward of a later micro-batch     attention [fwd.attention.n]   mlp [fwd.mlp.n]          hides replays of the same halves [1]
    receive of the gradient            [pipe.recv_backward]           hides the stage's last MLP half's                       [2]
    backward, from the last layer      mlp(L) [bwd.mlp.last]   attention(L) [bwd.attention.last]   mlp(L-1) ...
                                        replay attention(L)     replay mlp(L-1)                                               [3]
    with sequence parallelism          [bwd.X.0] X ...                a half's own replay, before its GEMMs                   [4]

[1] Only in the steady phase, and not in the model's last chunk, where the forward is the micro-batch's own; not without
    flushes, where the forward may use another version of the weights. What is regenerated is held until its backward. In
    cool-down the replay falls to the longest of the windows that are left.
[2] In cool-down the stages behind still run a forward between two backwards, so that wait is about a forward long.
[3] When the half before holds nothing but its inputs any more.
[4] That window gathers the gradient, and of the half only a dropout mask is needed before. Not with Transformer Engine, which
    reads what it saved first.
An input that is gathered once for its replay is gathered behind the first collective of the half before, so [1] and [2] come
too early for it. With several chunks on a stage:
[5] That forward may be another chunk's, so that a chunk with more layers than another one has no such windows.
[6] Only the last chunk's backwards wait as long as in [2]; in the others all stages run backwards, and a message is all that is
    waited for. In groups larger than the pipeline that is there in time, too, and on the last stage much too early. Before that,
    messages are overlapped with passes, and only the first gradient is waited for.
Every window has one half to hide, so no two replays share one. A window without length has no seats. A replay that communicates
has none: in FP8 with one scale for all ranks' parts of a norm's output, that of a norm (rule R2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from megatron_lynx.anatomy import DENSE, HALVES, Half
from megatron_lynx.anatomy.address import ON_DEMAND, RECV_BACKWARD
from megatron_lynx.config.job import Job
from megatron_lynx.cost.communication import gather_once_s, window_lengths_s
from megatron_lynx.cost.layer import LayerShape
from megatron_lynx.cost.stage import Phases, phases_of, stage_seconds
from megatron_lynx.schedule import interleaved
from megatron_lynx.solver.problem import ON_DEMAND_SEAT, Seat, own_window

if TYPE_CHECKING:
    from megatron_lynx.profiler.profile import Profile

Place = Literal["attention", "mlp", "last_mlp", "expert_attention"]
"""A kind of half: halves of one kind have the same windows."""

BEFORE: dict[Half, tuple[Half, str]] = {"attention": ("mlp", ""), "mlp": ("attention", "+1")}
"""The half whose backward comes before that of each half, and how a window's name says in which layer it is."""


def half_of(place: Place) -> Half:
    return "attention" if place in ("attention", "expert_attention") else "mlp"


NO_WINDOWS_BEFORE = ("last_mlp", "expert_attention")
"""Backward enters them from another stage, or from experts."""


class Wait(NamedTuple):
    """A window that may hide a replay."""

    name: str
    seconds: float


NOWHERE = Wait(ON_DEMAND, 0.0)


@dataclass(frozen=True)
class Seats:
    """The seats that a job's stages have."""

    job: Job
    profile: Profile

    def everywhere(self, place: Place, replay: Collection[str], backward: Sequence[Wait]) -> tuple[Seat, ...]:
        """Those that every stage has, beginning with the one on demand. `backward`: what `backward()` says of this half."""
        if not replay:
            return (ON_DEMAND_SEAT,)
        half = half_of(place)
        communicates = self.communicates(half, replay)
        windows = [NOWHERE, *(() if communicates else backward)]
        if not self.gathers(half, replay):
            return tuple(_seat(window) for window in windows)
        if place in NO_WINDOWS_BEFORE or communicates:
            return (Seat(ON_DEMAND, ON_DEMAND, gather=ON_DEMAND, gather_s=self._gathers_s[half, None]),)
        before, above = BEFORE[half]
        gather, gather_s = f"bwd.{before}.0{above}", self._gathers_s[half, before]
        return tuple(Seat(name, name, length, length, gather=gather, gather_s=gather_s) for name, length in windows)

    def gathers(self, half: Half, replay: Collection[str]) -> bool:
        """Whether the replay calls a GEMM whose input is gathered once."""
        return self.job.parallel.sequence_parallel and DENSE[half].column_parallel in replay

    def communicates(self, half: Half, replay: Collection[str]) -> bool:
        """Whether the replay makes a norm anew that reduces its amax."""
        return self.job.reduces_amaxes and DENSE[half].norm in replay

    @cached_property
    def message_bytes(self) -> int:
        """What a tensor-parallel collective of a layer moves."""
        return LayerShape(self.job.model, self.job.parallel, self.job.batch.micro).gathered_bytes

    def backward(self, place: Place, replay: Collection[str]) -> list[Wait]:
        """The windows of this backward that come before anything of the half is needed, the longest first."""
        half, waits = half_of(place), []
        gathers_late = place in NO_WINDOWS_BEFORE and self.gathers(half, replay)
        too_late = f"{half}_bda" in replay or gathers_late or self.job.model.uses_te
        if self.job.parallel.sequence_parallel and not too_late:  # [4]
            waits.append(Wait(own_window(half), self._lengths_s["bwd", half][0]))
        before, above = BEFORE[half]
        lengths = self._lengths_s["bwd", before]
        if place not in NO_WINDOWS_BEFORE and lengths:  # [3]
            waits.append(Wait(f"bwd.{before}.{len(lengths) - 1}{above}", lengths[-1]))
        return sorted((wait for wait in waits if wait.seconds > 0), key=lambda wait: -wait.seconds)

    def forward(self, half: Half) -> Wait:
        """The longest window of the half's own forward; of equals the last, as what is regenerated is held from there on."""
        lengths = self._lengths_s["fwd", half]
        ordinal = max(range(len(lengths)), key=lambda ordinal: (lengths[ordinal], ordinal), default=0)
        return Wait(f"fwd.{half}.{ordinal}", lengths[ordinal] if lengths else 0.0)

    @cached_property
    def _lengths_s(self) -> dict[tuple[Literal["fwd", "bwd"], Half], tuple[float, ...]]:
        passes: tuple[Literal["fwd", "bwd"], ...] = ("fwd", "bwd")
        return {
            (passing, half): window_lengths_s(self.profile, passing, DENSE[half], self.message_bytes)
            for passing in passes
            for half in HALVES
        }

    @cached_property
    def _gathers_s(self) -> dict[tuple[Half, Half | None], float]:
        """By half, and by the half behind whose first collective its input is gathered."""
        behind: list[tuple[Half, Half | None]] = [(half, other) for half in HALVES for other in (None, BEFORE[half][0])]
        return {
            (half, other): gather_once_s(self.profile, DENSE[half], DENSE[other] if other else None, self.message_bytes)
            for half, other in behind
        }

    @cached_property
    def p2p_s(self) -> float:
        """Seconds of one message between stages."""
        shape = LayerShape(self.job.model, self.job.parallel, self.job.batch.micro)
        return self.profile.link_s("p2p", shape.input_bytes)


@dataclass(frozen=True)
class StageSeats:
    """The seats that depend on the stage, or are there on some only. `chunks`: those of the stage that are to be alike."""

    seats: Seats
    stage: int
    chunks: tuple[int, ...] = (0,)

    def of(self, place: Place, replay: Collection[str], backward: Sequence[Wait]) -> Iterator[Seat]:
        """`backward`: what `Seats.backward()` says of this half."""
        half = half_of(place)
        if not replay or self.seats.gathers(half, replay) or self.seats.communicates(half, replay):
            return
        steady, late = [*self._forwards[half]], [*backward]
        if place == "last_mlp" and self.received_s is not None:  # in cool-down it may hide more than a window of its backward
            steady += [*backward, Wait(RECV_BACKWARD, 0.0 if self.seats.job.chunks > 1 else self.seats.p2p_s)]
            late.append(Wait(RECV_BACKWARD, self.received_s))
        cooldown = max(late, key=lambda wait: wait.seconds, default=NOWHERE)
        for wait in steady:
            yield Seat(wait.name, cooldown.name, wait.seconds, cooldown.seconds, self.phases.steady_share)

    def taken(self, seat: Seat, *, last_mlp: bool) -> Seat:
        """A seat that several chunks were offered, as it is in these: their own phases, their own wait in cool-down."""
        if seat.steady == seat.cooldown != RECV_BACKWARD:
            return seat
        waits = [Wait(seat.cooldown, seat.cooldown_s)]
        if self.received_s is not None and (last_mlp or seat.cooldown == RECV_BACKWARD):
            received = Wait(RECV_BACKWARD, self.received_s)
            waits = [received] if seat.cooldown == RECV_BACKWARD else [*waits, received]
        name, seconds = max(waits, key=lambda wait: wait.seconds)
        return replace(seat, cooldown=name, cooldown_s=seconds, steady_share=self.phases.steady_share)

    @cached_property
    def _forwards(self) -> dict[Half, list[Wait]]:
        """Windows of the forwards that come right before a backward. [5]"""
        job, layers = self.seats.job, self.seats.job.chunk_layers(self.stage)
        precedes = self.phases.steady > 0 and job.parallel.tensor > 1 and not self._last and job.schedule == "flush"
        everywhere = all(layers[chunk] == min(layers) for chunk in self.chunks)
        waits = {half: self.seats.forward(half) for half in HALVES}
        return {half: [wait] if precedes and everywhere and wait.seconds > 0 else [] for half, wait in waits.items()}

    @cached_property
    def phases(self) -> Phases:
        job = self.seats.job
        if job.chunks == 1:
            return phases_of(job, self.stage)
        last = interleaved.cooldown(job.parallel.pipeline, self.stage, job.microbatches, job.chunks, job.microbatch_group)
        late = sum(last[chunk] for chunk in self.chunks)
        return Phases(job.microbatches * len(self.chunks) - late, late)

    @property
    def has_more(self) -> bool:
        """Whether there are any that not every stage has."""
        return self.received_s is not None or any(self._forwards.values())

    @property
    def _last(self) -> bool:
        """Whether the model's last chunk is among them: it receives no gradient, and goes back at once."""
        job = self.seats.job
        return self.stage == job.parallel.pipeline - 1 and job.chunks - 1 in self.chunks

    @cached_property
    def received_s(self) -> float | None:
        """How long the gradient is awaited in cool-down, if it is. [6]"""
        seats, job = self.seats, self.seats.job
        lies_there = self.stage == job.parallel.pipeline - 1 and job.microbatch_group > job.parallel.pipeline
        if self._last or lies_there:
            return None
        if self.stage == job.parallel.pipeline - 1 or self.chunks != (job.chunks - 1,):
            return seats.p2p_s if job.microbatch_group == job.parallel.pipeline else 0.0
        forward_s = stage_seconds(job, seats.profile, self.stage + 1, seats.message_bytes).forward_s
        return seats.p2p_s + forward_s / job.chunks


def _seat(wait: Wait) -> Seat:
    return Seat(wait.name, wait.name, wait.seconds, wait.seconds)
