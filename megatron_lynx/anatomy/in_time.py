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

Not every replay may run in a window, nor may every checkpoint resume in one: `amax_reducing`, `resumes_in_wait`.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_lynx.anatomy.address import window_name
from megatron_lynx.fp8_recipes import Recipe, reduces_amaxes
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


def amax_reducing(
    section: Section, replay: Collection[str], recipe: Recipe | None, *, sequence_parallel: bool
) -> tuple[str, ...]:
    """The replayed items that reduce an amax in every call, so that they run on demand and in no window (rule R2): with sequence
    parallelism each rank has a part of what a linear gathers, and current scaling finds one scale for all parts."""
    return section.cast_together(replay) if sequence_parallel and reduces_amaxes(recipe) else ()


def resumes_in_wait(section: Section, recipe: Recipe | None, *, exchanges: bool, gathers: bool, userbuffers: bool) -> bool:
    """Whether a checkpoint's rest may run in the first wait of its own backward.

    `exchanges`: whether tokens of the section are exchanged in windows. `gathers`: whether tensor-parallel ranks gather its
    gradient; in FP8 that is not what backward begins with. With userbuffers no half has windows of its own.
    """
    if userbuffers or section.exchanges:
        return exchanges and not userbuffers
    return section.last_communicating is not None and gathers and recipe is None
