"""Passes of which only the seconds matter."""

from __future__ import annotations

from megatron_lynx.simulator.passes import PHASES, ChunkPasses, TimedPass, in_phases
from megatron_lynx.timeline import Span


def plain_passes(forward_s: float, backward_s: float, *, resident_bytes: int = 0) -> ChunkPasses:
    """Return a chunk without recomputation, from its two durations; its memory is allocated at the end of forward."""
    forward = TimedPass(forward_s, memory=((forward_s, resident_bytes),), spans=(Span("forward", 0.0, forward_s),))
    backward = TimedPass(backward_s, memory=((backward_s, -resident_bytes),), spans=(Span("backward", 0.0, backward_s),))
    return ChunkPasses(in_phases({("F", phase): forward for phase in PHASES} | {("B", phase): backward for phase in PHASES}))
