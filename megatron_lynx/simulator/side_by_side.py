"""One step of Megatron's combined schedule: a forward and a backward of different micro-batches run in turns, node by node.

    apart       F0 B0 F1 B1 F2 B2 ...              what layers hold: a layer more at most, which is counted beside them
    together    F0 [F1 with B0] [F2 with B1] ... B seconds: of each pair (`cost.combined`)

In a pair the forward is as long as both, and the backward behind it takes no time: what either hands on is there when both are
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_lynx.cost.combined import UNDISTURBED, Beside, Nodes, paired_s
from megatron_lynx.simulator.passes import PHASES, ChunkPasses, TimedPass
from megatron_lynx.simulator.simulation import Executed, Simulation
from megatron_lynx.simulator.timeline import MemoryCurve, Span


@dataclass(frozen=True)
class SideBySide(Simulation):
    """Seconds are those of pairs, bytes those of the same passes one after the other."""

    apart: Simulation

    def holding(self, stage: int) -> tuple[Executed, ...]:
        return self.apart.executed[stage]

    def memory(self, stage: int) -> MemoryCurve:
        return self.apart.memory(stage)

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


def paired(chunks: Sequence[PairedChunk], interference: float, beside: Beside = UNDISTURBED) -> list[ChunkPasses]:
    """The passes of the chunks of one stage. A chunk's steady forward is beside a backward of each of them as often."""
    beside = beside._replace(computing=min(beside.computing, 1 / interference))
    return [_paired(chunk, chunks, beside) for chunk in chunks]


def _paired(chunk: PairedChunk, chunks: Sequence[PairedChunk], beside: Beside) -> ChunkPasses:
    seconds = exposed_s = again_s = 0.0
    for other in chunks:
        both_s = paired_s(chunk.nodes, other.nodes, beside)
        seconds += (both_s + chunk.ends_s[0] + other.ends_s[1]) / len(chunks)
        exposed_s += (both_s - paired_s(chunk.without_again, other.without_again, beside)) / len(chunks)
        again_s += other.again_s / len(chunks)
    exposed_s = min(max(exposed_s, 0.0), again_s)
    host_s = chunk.passes.forward["steady"].host_s + sum(other.passes.backward["steady"].host_s for other in chunks) / len(chunks)
    spans = (Span("forward", 0.0, seconds),)
    forward = TimedPass(seconds, again_s - exposed_s, exposed_s, spans=spans).issued_in(host_s)
    own = {phase: (chunk.passes.forward[phase], chunk.passes.backward[phase]) for phase in PHASES}
    own["steady"] = forward, TimedPass()
    forwards, backwards = ({phase: both[way] for phase, both in own.items()} for way in (0, 1))
    return replace(chunk.passes, forward=forwards, backward=backwards, hiding={})
