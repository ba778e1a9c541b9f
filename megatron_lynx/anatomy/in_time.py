"""Which windows come before backward needs what a replay regenerates: said once, for plans, the solver and uniform plans.

backward, from the last layer     mlp(L) [bwd.mlp.*]   attention(L) [bwd.attention.*]   mlp(L-1) ...

any window of a half before       in time: nothing of this half is needed yet
the half's own window 0           with sequence parallelism it gathers the gradient, before any GEMM's saved tensor is read, so
                                  it is in time, but for two cases:
                                    the replay regenerates the dropout mask of the residual addition, which backward reads first
                                    it regenerates the row-parallel linear's input, and the layers are Transformer Engine's:
                                    its linears read what they saved before they gather
the half's later windows          too late

The own window 0 of experts that are shared out over ranks is in time, too, but for the dropout mask.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_lynx.anatomy.address import window_name
from megatron_lynx.kinds.section import Half, Section


def half_before(half: Half) -> tuple[Half, int]:
    """The half whose backward comes before that of `half`, and how many layers above it is."""
    return ("mlp", 0) if half == "attention" else ("attention", 1)


def own_windows_in_time(section: Section, replay: Collection[str], *, sequence_parallel: bool, te: bool) -> int:
    """How many windows of its own backward come before anything is needed that a replay of these items regenerates.

    `te`: the layers are Transformer Engine's.
    """
    row_parallel_input = te and section.before_row_parallel in replay
    return int(sequence_parallel and not (row_parallel_input or section.residual in replay))


def own_exchanges_in_time(section: Section, replay: Collection[str]) -> int:
    """The same for a section whose windows are exchanges of tokens: the first one brings back the gradient of what experts
    returned. Before it backward reads of all that may be replayed only the dropout mask of the residual addition."""
    return int(section.residual not in replay)


def own_window(half: Half) -> str:
    """What a plan calls the first window of a half's own backward."""
    return window_name("bwd", half, 0)
