"""One step of Megatron's combined schedule: a forward and a backward of different micro-batches run in turns, node by node.

    apart       F0 B0 F1 B1 F2 B2 ...              what layers hold: a layer more at most, which is counted beside them
    together    F0 [F1 with B0] [F2 with B1] ... B seconds: of each pair (`cost.combined`)

In a pair the forward is as long as both, and the backward behind it takes no time: what either hands on is there when both are
over. What goes to the host half by half goes both ways meanwhile; copies that are longer than a pair are waited for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

from megatron_lynx.cost.combined import Beside, Nodes, paired_s
from megatron_lynx.simulator.passes import PHASES, ChunkPasses, TimedPass
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.timeline import MemoryCurve, Span


@dataclass(frozen=True)
class SideBySide(Simulation):
    """Seconds are those of pairs, bytes those of the same passes one after the other, and `more_bytes` on each stage."""

    apart: Simulation
    more_bytes: tuple[int, ...] = ()
    """What is on its way to the host and back in both passes of a pair, beyond what one of them and a layer hold."""

    def holding(self, stage: int) -> tuple[Executed, ...]:
        return self.apart.executed[stage]

    def copies(self, stage: int) -> bool:
        return super().copies(stage) or self.apart.copies(stage)

    def memory(self, stage: int) -> MemoryCurve:
        alone = self.apart.memory(stage)
        more = self.more_bytes[stage] if self.more_bytes else 0
        return MemoryCurve(alone.times_s, tuple(size + more for size in alone.bytes)) if more else alone

    def regenerated(self, stage: int) -> MemoryCurve:
        return self.apart.regenerated(stage)


@dataclass(frozen=True)
class PairedChunk:
    """One chunk of a stage: its passes by themselves, and its layers in nodes."""

    passes: ChunkPasses
    nodes: tuple[Nodes, ...]
    again_s: float
    """Seconds of what runs again in its backward, a part of these nodes."""
    without_again: tuple[Nodes, ...]
    """The same nodes where nothing does."""
    ends_s: tuple[float, float]
    """What runs before the model's first and behind its last layer, forward and backward, where it has them."""
    copy_s: float = 0.0
    """For how long a pair of it is under way at least, because of what goes to the host in it, or comes back."""


def most_beside(chunks: Sequence[ChunkPasses], layer_bytes: int) -> int:
    """How much more a pair of a chunk that goes half by half holds at most than its passes one after the other, and a layer."""
    if len(chunks) > 1 or (own := chunks[0].at_once) is None:
        return 0
    forward, backward = own.forward["steady"], own.backward["steady"]
    kept_bytes = sum(change for _, change in forward.memory)
    made, left = list(_by_layer(forward)), [kept_bytes + size for size in _by_layer(backward)]
    together_bytes = max(map(sum, zip(made, left, strict=True)), default=0)
    return max(0, together_bytes - max(*made, *left, 0) - layer_bytes)


def _by_layer(one: TimedPass) -> Iterator[int]:
    """The most that a pass has taken since it began, while each of its layers runs."""
    times_s = [0.0, *(at_s for at_s, _ in one.memory)]
    taken = [0, *accumulate(change for _, change in one.memory)]
    halves = [span for span in one.spans if span.kind in ("forward", "backward")]
    ends_s = sorted({span.layer: span.end_s for span in sorted(halves, key=lambda span: span.end_s)}.values())
    for begin_s, end_s in pairwise([0.0, *ends_s[:-1], one.seconds]):
        yield max(taken[max(0, bisect_left(times_s, begin_s) - 1) : bisect_right(times_s, end_s)])


def paired(chunks: Sequence[PairedChunk], beside: Beside, *, delayed: bool = False) -> list[ChunkPasses]:
    """The passes of the chunks of one stage. A chunk's steady forward is beside a backward of each of them as often. `delayed`:
    gradients of weights are nodes of their own."""
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
    host_s = chunk.passes.forward["steady"].host_s + sum(other.passes.backward["steady"].host_s for other in chunks) / len(chunks)
    spans = (Span("forward", 0.0, seconds),)
    waited_s = max(0.0, chunk.copy_s - seconds)
    passed = TimedPass(seconds + waited_s, again_s - exposed_s, exposed_s, spans=spans, copy_wait_s=waited_s)
    forward = passed.issued_in(host_s)
    own = {phase: (chunk.passes.forward[phase], chunk.passes.backward[phase]) for phase in PHASES}
    own["steady"] = forward, TimedPass()
    forwards, backwards = ({phase: both[way] for phase, both in own.items()} for way in (0, 1))
    copy = chunk.passes.copy if chunk.passes.at_once is None else None
    return replace(chunk.passes, forward=forwards, backward=backwards, hiding={}, copy=copy, at_once=None)
