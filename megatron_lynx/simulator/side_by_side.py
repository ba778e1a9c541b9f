"""A step of Megatron's combined schedule, which interleaves a forward and a backward of different micro-batches node by node.

    apart       F0 B0 F1 B1 F2 B2 ...              bytes: of these passes, and at most one layer more, counted separately
    together    F0 [F1 with B0] [F2 with B1] ... B seconds: of each pair (`cost.combined`)

A pair is a forward of the pair's length and a backward that takes no time: both outputs are ready at its end. Half-by-half copies
run in both directions during a pair, and a pair waits for copies that are longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from megatron_lynx.cost.combined import Beside, Nodes, paired_s
from megatron_lynx.simulator.passes import ChunkPasses, TimedPass
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.timeline import MemoryCurve, Span


@dataclass(frozen=True)
class SideBySide(Simulation):
    """Seconds of pairs; bytes of the same passes run one after the other, plus `more_bytes` on each stage."""

    apart: Simulation
    more_bytes: tuple[int, ...] = ()
    """Bytes in flight to and from the host in both passes of a pair, beyond those of one pass and a layer."""

    def holding(self, stage: int) -> tuple[Executed, ...]:
        return self.apart.executed[stage]

    def memory(self, stage: int) -> MemoryCurve:
        alone = self.apart.memory(stage)
        more = self.more_bytes[stage] if self.more_bytes else 0
        return MemoryCurve(alone.times_s, tuple(size + more for size in alone.bytes)) if more else alone

    def regenerated(self, stage: int) -> MemoryCurve:
        return self.apart.regenerated(stage)


@dataclass(frozen=True)
class PairedChunk:
    """One chunk of a stage: its separate passes, and the nodes of its layers. `again_s`: recomputation in its backward, a part of
    these nodes. `ends_s`: of the embedding and of the output layer, forward and backward."""

    passes: ChunkPasses
    nodes: tuple[Nodes, ...]
    again_s: float
    without_again: tuple[Nodes, ...]
    ends_s: tuple[float, float]
    copy_s: float = 0.0
    """Shortest duration of a pair, because of its host copies."""


def most_beside(chunks: Sequence[ChunkPasses], layer_bytes: int) -> int:
    """Bytes that a pair of a half-by-half offloaded chunk holds beyond its separate passes and one layer, at most."""
    if len(chunks) > 1 or (passes := chunks[0].at_once) is None:
        return 0
    forward, backward = passes.one("F", "steady"), passes.one("B", "steady")
    kept_bytes = sum(change for _, change in forward.memory)
    made, left = list(_by_layer(forward)), [kept_bytes + size for size in _by_layer(backward)]
    together_bytes = max(map(sum, zip(made, left, strict=True)), default=0)
    return max(0, together_bytes - max(*made, *left, 0) - layer_bytes)


def _by_layer(one: TimedPass) -> Iterator[int]:
    """Peak bytes allocated since the pass began, during each of its layers."""
    times_s = [0.0, *(at_s for at_s, _ in one.memory)]
    taken = [0, *accumulate(change for _, change in one.memory)]
    halves = [span for span in one.spans if span.kind in ("forward", "backward")]
    ends_s = sorted({span.layer: span.end_s for span in sorted(halves, key=lambda span: span.end_s)}.values())
    for begin_s, end_s in pairwise([0.0, *ends_s[:-1], one.seconds]):
        yield max(taken[max(0, bisect_left(times_s, begin_s) - 1) : bisect_right(times_s, end_s)])


def paired(chunks: Sequence[PairedChunk], beside: Beside, *, delayed: bool = False) -> list[ChunkPasses]:
    """Return the passes of a stage's chunks. A steady forward is paired equally often with each chunk's backward. `delayed`:
    weight gradients are nodes."""
    return [_paired(chunk, chunks, partial(paired_s, beside=beside, delayed=delayed)) for chunk in chunks]


def _paired(
    chunk: PairedChunk, chunks: Sequence[PairedChunk], pair_s: Callable[[Sequence[Nodes], Sequence[Nodes]], float]
) -> ChunkPasses:
    seconds = exposed_s = again_s = 0.0
    for other in chunks:
        both_s = pair_s(chunk.nodes, other.nodes)
        seconds += (both_s + chunk.ends_s[0] + other.ends_s[1]) / len(chunks)
        exposed_s += (both_s - pair_s(chunk.without_again, other.without_again)) / len(chunks)
        again_s += other.again_s / len(chunks)
    exposed_s = min(max(exposed_s, 0.0), again_s)
    backward_host_s = sum(other.passes.one("B", "steady").host_s for other in chunks) / len(chunks)
    host_s = chunk.passes.one("F", "steady").host_s + backward_host_s
    spans = (Span("forward", 0.0, seconds),)
    waited_s = max(0.0, chunk.copy_s - seconds)
    passed = TimedPass(seconds + waited_s, again_s - exposed_s, exposed_s, spans=spans, copy_wait_s=waited_s)
    copy = chunk.passes.copy if chunk.passes.at_once is None else None
    return replace(chunk.passes.with_steady(passed.issued_in(host_s), TimedPass()), copy=copy, at_once=None)
