"""Seats in the receive of the gradient, a window that only some stages have.

    receive of the gradient            [pipe.recv_backward]           hides the recomputation of the stage's last half        [1]
    backward                           see `solver.seats`

[1] In cool-down the later stages run a forward between two backwards, so the receive takes about as long as a forward. It cannot
    hide recomputation whose input is gathered, because the gather runs in the backward. With several chunks on a stage:
[2] Only the last chunk's backwards wait as long as in [1]. In the other chunks all stages run backwards, and the stage waits for
a
    message only. If micro-batch groups are larger than the pipeline, the message arrives in time. Before cool-down messages
    overlap with passes, and the stage waits for the first gradient only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.cost.section import PricedSection
from megatron_lynx.cost.stage import Phases, phases_of, stage_seconds
from megatron_lynx.schedule.flushes import cooldown
from megatron_lynx.solver.placement import Placement, Seat
from megatron_lynx.solver.seats import HalfKind, Seats


@dataclass(frozen=True)
class StageSeats:
    """Seats that depend on the stage. `chunks`: chunks of the stage whose layers are treated alike."""

    seats: Seats
    stage: int
    chunks: tuple[int, ...] = (0,)

    def of(
        self, kind: HalfKind, recompute: Collection[str], backward: Sequence[Placement], price: PricedSection
    ) -> Iterator[Seat]:
        """Yield the seats that this stage has and others lack. `backward`: the result of `Seats.backward()` for this half."""
        if not recompute or self.seats.gathers(kind, recompute) or self.seats.communicates(kind, recompute):
            return
        if not kind.last or self.received_s is None:
            return
        message_s = 0.0 if self.seats.job.chunks > 1 else self.seats.p2p_s
        cooldown_placements = [*backward[:1], Placement.in_window(RECV_BACKWARD, self.received_s)]
        hidden = partial(Placement.hidden_s, recompute_s=price.recompute_s, interference=self.seats.profile.interference)
        cooldown = max(cooldown_placements, key=hidden)  # the receive may hide more than a window of the backward
        for steady in (*backward[:1], Placement.in_window(RECV_BACKWARD, message_s)):
            yield Seat(steady, cooldown, self.phases.steady_share)

    def taken(self, seat: Seat, *, last: bool) -> Seat:
        """Return a seat that was chosen for several chunks with the phases and the cool-down wait of these chunks.

        last: the seat belongs to the stage's last half.
        """
        if seat.steady == seat.cooldown and not seat.cooldown.in_receive:
            return seat
        cooldown = seat.cooldown
        if self.received_s is not None and (last or cooldown.in_receive):
            received = Placement.in_window(RECV_BACKWARD, self.received_s)
            cooldown = received if cooldown.in_receive else max(cooldown, received, key=lambda placement: placement.seconds)
        return replace(seat, cooldown=cooldown, steady_share=self.phases.steady_share)

    @cached_property
    def phases(self) -> Phases:
        job = self.seats.job
        if job.chunks == 1:
            return phases_of(job, self.stage)
        last = cooldown(job.parallel.pipeline, self.stage, job.microbatches, job.chunks, job.microbatch_group)
        cooldown_passes = sum(last[chunk] for chunk in self.chunks)
        return Phases(job.microbatches * len(self.chunks) - cooldown_passes, cooldown_passes)

    @property
    def has_more(self) -> bool:
        return self.received_s is not None

    @property
    def _last(self) -> bool:
        """Whether the model's last chunk is included. It receives no gradient, and its backward follows its own forward."""
        job = self.seats.job
        return self.stage == job.parallel.pipeline - 1 and job.chunks - 1 in self.chunks

    @cached_property
    def received_s(self) -> float | None:
        """Seconds for which the stage waits for the gradient in cool-down; None if it does not wait. [2]"""
        seats, job = self.seats, self.seats.job
        lies_there = self.stage == job.parallel.pipeline - 1 and job.microbatch_group > job.parallel.pipeline
        if self._last or lies_there or job.model.moe_overlapped:
            return None
        if self.stage == job.parallel.pipeline - 1 or self.chunks != (job.chunks - 1,):
            return seats.p2p_s if job.microbatch_group == job.parallel.pipeline else 0.0
        forward_s = stage_seconds(job, seats.profile, self.stage + 1).forward_s
        return seats.p2p_s + forward_s / job.chunks
