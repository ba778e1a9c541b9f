"""Offload within micro-batches: bytes that leave in each chunk's forward and return in its backward (`Leaver`).

    fraction r of bytes kept without recomputation      ──solve with that much more budget──> the layers' choices
                                                          if less can leave, solve again with that
    seconds of these copies     overlap with the forwards of all halves but the first, and with as many backwards

A chunk's input stays, because Megatron holds it. What its last half keeps stays, because backward needs it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress
from math import inf
from typing import NamedTuple

from megatron_lynx.anatomy import Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost.combined import keeping_all, nodes_of, paired_s
from megatron_lynx.cost.host import NO_HOST_TIME, offloading_host_s
from megatron_lynx.cost.stage import chunks_in_flight, half_seconds
from megatron_lynx.pace import Pace
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.schedule.flushes import counts_at_backwards
from megatron_lynx.solver.answer import Leaving, Solved, SolvedChunks
from megatron_lynx.timeline import Passes

SLACK = 0.95
"""Part of the bytes that a link copies during a half: halves differ, and passes wait for copies that are too slow. With 1, 23
bundled jobs at the bytes of stock's full recomputation take 0.13 % longer in the mean and 1.7 % at worst; with 0.9, 0.27 % and
1.6 %."""


def bytes_copied_in(profile: Profile, seconds: float) -> float:
    """Return the bytes that the link to the host copies one way; infinite without such a link."""
    size_bytes = 2**30
    copy_s = profile.link_s("host", size_bytes)
    return size_bytes * seconds / copy_s if copy_s else inf


def may_go_within(job: Job) -> bool:
    """Whether offload within micro-batches is possible; beside overlapped exchanges of experts only with one chunk."""
    return job.schedule == "flush" and (job.chunks == 1 or not job.model.moe_overlapped)


def host_s(profile: Profile, chunks: SolvedChunks, offloaded: Iterable[Section]) -> Passes:
    """Host time to issue one micro-batch through all chunks of a stage. `offloaded`: sections of halves that are offloaded."""
    host = sum((half.host for chunk in chunks for half in chunk.halves), start=NO_HOST_TIME)
    return sum((offloading_host_s(profile, section) for section in offloaded), start=host)


@dataclass(frozen=True)
class Leaver:
    """Finds what leaves within micro-batches of one stage, chunk by chunk."""

    job: Job
    profile: Profile
    stage: int

    def leaving(
        self, asked_bytes: int, budget_bytes: int | None, solved: Callable[[int | None], SolvedChunks]
    ) -> tuple[SolvedChunks, tuple[Leaving, ...], int]:
        """Return the choices with which the requested bytes leave every chunk, or as many as then can, and `leaving` and
        `spared_bytes` of the stage's answer.

        `solved` solves the chunks with a budget. Raises `Infeasible` as `solved` does.
        """
        spared_bytes = self.in_flight * asked_bytes
        while True:
            chunks = solved(None if budget_bytes is None else budget_bytes + spared_bytes)
            parts = [self._leaves(chunk, solved, asked_bytes) for chunk, solved in zip(self._chunks, chunks, strict=True)]
            beside = zip(chunks.beside_each_other, parts, strict=False)
            beside_bytes = min(chunks.most_resident_bytes - solved.resident_bytes + part.bytes for solved, (part, _) in beside)
            most_bytes = min(gone_bytes for _, gone_bytes in parts) + (self.in_flight - 1) * beside_bytes
            if most_bytes >= spared_bytes:
                return chunks, tuple(part for part, _ in parts), spared_bytes
            spared_bytes = most_bytes

    @property
    def in_flight(self) -> int:
        """Micro-batches in flight, of all chunks together."""
        return chunks_in_flight(self.job, self.stage)

    @property
    def host_sets(self) -> tuple[int, ...]:
        """Micro-batches of each chunk on the host at once."""
        if self.job.model.moe_overlapped:
            return (self.in_flight + 1,)
        layout = self.job.parallel.pipeline, self.stage, self.job.microbatches, self.job.chunks, self.job.microbatch_group
        return tuple(max(count[chunk] for count in some) for chunk, some in enumerate(counts_at_backwards(*layout)))

    def hidden_bytes(self) -> int:
        """Return the bytes that can be copied during the forward of every chunk."""
        waits_s = [(1 - 1 / len(chunk.sections)) * chunk.forward_s for chunk in self._chunks if chunk.sections]
        copied_bytes = min((bytes_copied_in(self.profile, seconds) for seconds in waits_s), default=inf)
        return int(copied_bytes) if copied_bytes < inf else 0

    def _leaves(self, chunk: _Chunk, solved: Solved, asked_bytes: int) -> tuple[Leaving, int]:
        """Return what leaves a chunk with these choices, at most `asked_bytes`, and the bytes that are away before its last half
        ends. Those that are away only after it save memory for the other micro-batches in flight."""
        sizes, halves = self._sizes(solved, asked_bytes), len(chunk.sections)
        if not (size_bytes := sum(sizes)):
            return Leaving(), 0
        copy_s, half_s = self.profile.link_s("host", size_bytes), chunk.forward_s / halves
        pace_bytes = max(1, int(SLACK * size_bytes * half_s / copy_s)) if copy_s else size_bytes
        pace = Pace(pace_bytes, halves)
        turns = [(size, pace.leaves(place, size)) for place, size in enumerate(sizes, start=1) if size]
        gone_bytes = sum(size for size, turn in turns if turn.away < halves)
        return Leaving(size_bytes, pace_bytes, tuple(compress(chunk.sections, sizes))), gone_bytes

    def _sizes(self, solved: Solved, size_bytes: int) -> list[int]:
        """Return the bytes that leave each half but the last, first those that forward produced first."""
        first, *later_bytes = [half.memory.movable for half in solved.halves] or [0]
        held = 0 if self.job.model.moe_overlapped else LayerShape.of(self.job).input_bytes
        movable = [max(0, first - held), *later_bytes[:-1]] if later_bytes else []
        before = [0, *accumulate(movable)]
        return [min(size, max(0, size_bytes - gone)) for size, gone in zip(movable, before, strict=False)]

    @cached_property
    def _chunks(self) -> tuple[_Chunk, ...]:
        return tuple(self._chunk(self.job.layers_of(self.stage, chunk)) for chunk in range(self.job.chunks))

    def _chunk(self, layers: Sequence[int]) -> _Chunk:
        kinds = self.job.model.each_kind(layers)
        sections = tuple(section for kind in kinds for section in kind)
        if self.job.model.moe_overlapped:
            nodes = tuple(nodes_of(self.profile, keeping_all(self.profile, kind), kind) for kind in kinds)
            return _Chunk(sections, paired_s(nodes, nodes, delayed=self.job.model.moe_delayed))
        seconds = {section: half_seconds(self.profile, section).forward_s for section in dict.fromkeys(sections)}
        return _Chunk(sections, sum(seconds[section] for section in sections))


class _Chunk(NamedTuple):
    sections: tuple[Section, ...]
    """Its halves, in forward order."""
    forward_s: float
    """If forwards and backwards alternate, both take as long."""
