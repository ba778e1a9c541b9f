"""What was decided for one stage: the layers of each of its chunks (virtual stages), what they hold, and what they expose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from megatron_lynx.cost.host import NO_HOST_TIME, HostSeconds
from megatron_lynx.cost.stage import StageSeconds
from megatron_lynx.solver.answer import Solved


class SolvedChunks(tuple[Solved, ...]):
    """By chunk: those that are in flight beside each other, then the one whose backward follows its own forward, if there is one.

    That one is solved as if it were alone."""

    @property
    def beside_each_other(self) -> tuple[Solved, ...]:
        return self[:-1] if len(self) > 1 and self[-1].in_flight == 1 else self

    @property
    def most_resident_bytes(self) -> int:
        """What the largest of those in flight beside others keeps of one micro-batch."""
        return max(chunk.resident_bytes for chunk in self.beside_each_other)

    @property
    def peak_bytes(self) -> int:
        """While any of them runs backward, with as many of the largest beside it as there can be."""
        return max(chunk.peak_bytes + self._more_beside(chunk) for chunk in self)

    @property
    def beside_bytes(self) -> int:
        """What is held of the others at most while one runs backward."""
        return ceil((self[0].in_flight - 1) * self.most_resident_bytes)

    @property
    def before_loss_bytes(self) -> int:
        """What is held when the model's last chunk has run forward: of itself, and of all that are in flight beside it."""
        return ceil(self[-1].resident_bytes + (self[0].in_flight - 1) * self.most_resident_bytes)

    def _more_beside(self, chunk: Solved) -> int:
        """How much more the others hold than as many chunks of its own kind would."""
        counted = chunk.resident_bytes if chunk.in_flight == self[0].in_flight else 0
        return ceil((self[0].in_flight - 1) * (self.most_resident_bytes - counted))


class Within(NamedTuple):
    """What leaves within each micro-batch of a stage where its own backward follows at once (`runtime.offload.half_by_half`)."""

    bytes: int
    pace_bytes: int
    """So many are copied beside one half's forward."""
    gone_bytes: int
    """What is not there when the last half ends its forward and when it begins its backward."""


@dataclass(frozen=True)
class StageAnswer:
    """The choices for one stage. Seconds are those of one micro-batch through all its chunks, but for `exposed_copies_s`."""

    stage: int
    chunks: SolvedChunks
    in_flight: int
    """Chunks between their forward and their backward, at most."""
    offload_ratio: float
    """The share of what every chunk keeps that was asked to be offloaded."""
    stock: StageSeconds
    """Forward and backward without replays."""
    exposed_copies_s: float
    """Seconds of a whole step in which passes wait for copies."""
    host_sets: tuple[int, ...] = ()
    """Micro-batches of each chunk that are in host memory at once."""
    received_bytes: int = 0
    """The input of a micro-batch from the stage before. Megatron itself holds it, so it stays on the device."""
    offloaded_share: float = 0.0
    """The share of what every chunk keeps that is offloaded at least: what was asked for, or what can be moved."""
    host: HostSeconds = NO_HOST_TIME
    """What the host takes to issue all of it; 0 where that is not known."""
    within: Within | None = None
    """Of a stage that offloads within a micro-batch: then no share is."""

    @property
    def host_late_s(self) -> float:
        """By how much its passes are longer than on the device alone, because the host is slower."""
        return self.host.beyond(self.stock.forward_s, self.stock.backward_s + self.longer_s)

    @property
    def exposed_s(self) -> float:
        return sum(chunk.exposed_s for chunk in self.chunks)

    @property
    def longer_s(self) -> float:
        """By how much its passes take longer on the device than without replays; below 0 where they take less."""
        return sum(chunk.longer_s for chunk in self.chunks)

    @property
    def peak_bytes(self) -> int:
        """What all its layers hold at most, all chunks in flight, or they and the loss. No less than what a simulation finds."""
        return self.chunks.peak_bytes - self.within_bytes

    @property
    def within_bytes(self) -> int:
        """What of the one micro-batch is gone when its last half ends its forward, and begins its backward."""
        return 0 if self.within is None else self.within.gone_bytes

    @property
    def layers_peak_bytes(self) -> int:
        """The same without the loss, while layers run backward."""
        return SolvedChunks(replace(chunk, loss_bytes=0) for chunk in self.chunks).peak_bytes - self.within_bytes

    @property
    def before_loss_bytes(self) -> int:
        """What is held when the model's last chunk has run forward: then all that leaves within it is gone."""
        return self.chunks.before_loss_bytes - (0 if self.within is None else self.within.bytes)

    @property
    def chunk_bytes(self) -> int:
        """What the largest chunk that is in flight beside others keeps of one micro-batch (C)."""
        return self.chunks.most_resident_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory of one rank."""
        return sum(sets * self.offloaded_bytes(chunk) for chunk, sets in enumerate(self.host_sets))

    def offloaded_bytes(self, chunk: int) -> int:
        """What one micro-batch of a chunk offloads."""
        if self.within is not None:
            return self.within.bytes
        return min(int(self.offload_ratio * self.chunks[chunk].resident_bytes), self._movable_bytes(chunk))

    @property
    def movable_share(self) -> float:
        """The part of what a chunk keeps that can be offloaded, for the chunk for which that is least."""
        return min(
            (
                self._movable_bytes(at) / max(1, chunk.resident_bytes)
                for at, chunk in enumerate(self.chunks.beside_each_other)
                if chunk.layers
            ),
            default=0.0,
        )

    def _movable_bytes(self, chunk: int) -> int:
        received = 0 if (self.stage, chunk) == (0, 0) else self.received_bytes
        return max(0, self.chunks[chunk].movable_bytes - received)

    def seconds(self, microbatches: int) -> float:
        """How long one micro-batch takes, with its part of the exposed copies."""
        return self.stock.both_s + self.longer_s + self.host_late_s + self.exposed_copies_s / microbatches
