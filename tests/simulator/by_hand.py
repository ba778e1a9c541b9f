"""Passes of a chunk whose halves are made by hand."""

from __future__ import annotations

from typing import Any

from megatron_lynx.cost.section import Prices
from megatron_lynx.simulator.halves import stage_passes
from megatron_lynx.simulator.passes import PASS_KINDS, PHASES, ChunkPasses, TimedPass, in_phases
from megatron_lynx.simulator.walk import Treated
from megatron_lynx.timetable import Layout, Timetable


def passes_of_halves(halves: tuple[Treated, ...], profile: Any, *ends: Any, **more: Any) -> ChunkPasses:
    """Of the only chunk of a stage. `ends`: embedding and head."""
    shape, layers = profile.shape, [half.planned.layer for half in halves]
    layout = Layout(shape.tensor > 1, shape.sequence_parallel, layers if shape.expert > 1 else ())
    timetable = Timetable([[half.planned for half in halves]], layout)
    return stage_passes(timetable, 0, halves, Prices(profile), *ends, **more)


def receiving(plain: ChunkPasses, received: TimedPass) -> ChunkPasses:
    """A chunk with this recomputation in every receive."""
    passes = {(kind, phase): plain.one(kind, phase) for kind in PASS_KINDS for phase in PHASES}
    return ChunkPasses(in_phases(passes | {("R", phase): received for phase in PHASES}))
