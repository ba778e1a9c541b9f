"""The window that only some stages have: the receive of the gradient.

    receive of the gradient            [pipe.recv_backward]           hides the replay of the stage's last half               [1]
    backward                           as in `solver.seats`

[1] In cool-down the stages behind still run a forward between two backwards, so that wait is about a forward long. An input that
    is gathered once for its replay is gathered in the backward, so it comes too early for that. With several chunks on a stage:
[2] Only the last chunk's backwards wait as long as in [1]. In the others all stages run backwards, and a message is all that is
    waited for. In groups larger than the pipeline the message arrives in time, and on the last stage long before. Before
    cool-down messages are overlapped with passes, and only the first gradient is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from megatron_lynx.anatomy.address import RECV_BACKWARD
from megatron_lynx.cost.section import PricedSection
from megatron_lynx.cost.stage import Phases, phases_of, stage_seconds
from megatron_lynx.schedule import interleaved
from megatron_lynx.solver.placement import Placement, Seat
from megatron_lynx.solver.seats import HalfKind, Seats


@dataclass(frozen=True)
class StageSeats:
    """The seats that depend on the stage. `chunks`: those chunks of it whose layers are to be treated alike."""

    seats: Seats
    stage: int
    chunks: tuple[int, ...] = (0,)

    def of(self, kind: HalfKind, replay: Collection[str], backward: Sequence[Placement], price: PricedSection) -> Iterator[Seat]:
        """Those that not every stage has. `backward`: what `Seats.backward()` says of this half."""
        if not replay or self.seats.gathers(kind, replay) or self.seats.communicates(kind, replay):
            return
        if not kind.last or self.received_s is None:
            return
        message_s = 0.0 if self.seats.job.chunks > 1 else self.seats.p2p_s
        late = [*backward[:1], Placement.in_window(RECV_BACKWARD, self.received_s)]
        hidden = partial(Placement.hidden_s, replay_s=price.replay_s, interference=self.seats.profile.interference)
        cooldown = max(late, key=hidden)  # the receive may hide more than a window of the backward
        for steady in (*backward[:1], Placement.in_window(RECV_BACKWARD, message_s)):
            yield Seat(steady, cooldown, self.phases.steady_share)

    def taken(self, seat: Seat, *, last: bool) -> Seat:
        """A seat that several chunks were offered, as it is in these: their own phases, their own wait in cool-down.

        `last`: whether it is that of the last half.
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
        last = interleaved.cooldown(job.parallel.pipeline, self.stage, job.microbatches, job.chunks, job.microbatch_group)
        late = sum(last[chunk] for chunk in self.chunks)
        return Phases(job.microbatches * len(self.chunks) - late, late)

    @property
    def has_more(self) -> bool:
        """Whether there are any that not every stage has."""
        return self.received_s is not None

    @property
    def _last(self) -> bool:
        """Whether the model's last chunk is among them: it receives no gradient, and its backward follows its own forward."""
        job = self.seats.job
        return self.stage == job.parallel.pipeline - 1 and job.chunks - 1 in self.chunks

    @cached_property
    def received_s(self) -> float | None:
        """How long the gradient is awaited in cool-down, if it is. [2]"""
        seats, job = self.seats, self.seats.job
        lies_there = self.stage == job.parallel.pipeline - 1 and job.microbatch_group > job.parallel.pipeline
        if self._last or lies_there or job.model.moe_overlapped:
            return None
        if self.stage == job.parallel.pipeline - 1 or self.chunks != (job.chunks - 1,):
            return seats.p2p_s if job.microbatch_group == job.parallel.pipeline else 0.0
        forward_s = stage_seconds(job, seats.profile, self.stage + 1, seats.shape.gathered_bytes).forward_s
        return seats.p2p_s + forward_s / job.chunks
