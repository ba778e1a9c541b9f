"""Which windows precede backward's first use of a recomputed tensor. Used by plans, the solver and uniform plans.

backward, from the last layer     mlp(L) [bwd.mlp.*]   attention(L) [bwd.attention.*]   mlp(L-1) ...

any window of a half before       in time: this half's tensors are not needed yet
the half's own window 0           in time with sequence parallelism: it gathers the gradient before any GEMM's saved tensor is
                                  read. Two exceptions:
                                    the dropout mask of the residual addition is recomputed; backward reads it first
                                    the row-parallel linear's input is recomputed, in Transformer Engine's layers: its linears
                                    read their saved tensors before they gather
the half's later windows          too late
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_lynx.anatomy.address import window_name
from megatron_lynx.fp8_recipes import Recipe, reduces_amaxes
from megatron_lynx.kinds.section import Half, Section


def half_before(half: Half) -> tuple[Half, int]:
    return ("mlp", 0) if half == "attention" else ("attention", 1)


def own_windows_in_time(section: Section, recompute: Collection[str], *, sequence_parallel: bool, te: bool) -> int:
    """Number of windows of the half's backward before it needs a tensor that these items recompute."""
    row_parallel_input = te and section.before_row_parallel in recompute
    return int(sequence_parallel and not (row_parallel_input or section.residual in recompute))


def own_exchanges_in_time(section: Section, recompute: Collection[str]) -> int:
    """The same for exchanges of tokens: before the first one backward reads only the dropout mask."""
    return int(section.residual not in recompute)


def own_window(half: Half) -> str:
    return window_name("bwd", half, 0)


def amax_reducing(
    section: Section, recompute: Collection[str], recipe: Recipe | None, *, sequence_parallel: bool
) -> tuple[str, ...]:
    """The recomputed items that reduce an amax in every call, so that they run on demand and in no window (rule R2): with
    sequence parallelism each rank has a part of a linear's gathered input, and current scaling needs one scale for all parts."""
    return section.cast_together(recompute) if sequence_parallel and reduces_amaxes(recipe) else ()


def resumes_in_wait(section: Section, recipe: Recipe | None, *, exchanges: bool, gathers: bool, userbuffers: bool) -> bool:
    """Whether a checkpoint's rest may run in the first wait of its backward. `exchanges`: tokens of the section are exchanged in
    windows. `gathers`: tensor-parallel ranks gather its gradient; in FP8 backward does not begin with that."""
    if userbuffers or section.exchanges:
        return exchanges and not userbuffers
    return section.last_communicating is not None and gathers and recipe is None
