"""The usual attention and the MLP of a run: which classes of Megatron's and of Transformer Engine's fit."""

from __future__ import annotations

from collections.abc import Iterator

from torch.nn import Module

from megatron_lynx.apply.live_run import IDENTITY, LINEARS, TE_MODULE, LiveRun
from megatron_lynx.errors import Problem
from megatron_lynx.kinds.dense.section import ATTENTION, MLP
from megatron_lynx.kinds.held import Classes, Layers, Running
from megatron_lynx.kinds.section import Section
from megatron_lynx.plan.plan import Plan

LOCAL: Classes = {"column_parallel": (f"{LINEARS}ColumnParallelLinear",), "row_parallel": (f"{LINEARS}RowParallelLinear",)}
TE: Classes = {
    "norm": (IDENTITY,),
    "column_parallel": (f"{TE_MODULE}TELayerNormColumnParallelLinear",),
    "core": (f"{TE_MODULE}TEDotProductAttention",),
    "row_parallel": (f"{TE_MODULE}TERowParallelLinear",),
}


class _Usual(Running):
    """What a half has where it has nothing else."""

    local, te = LOCAL, TE
    section: Section

    def section_in(self, layer: Module) -> Section | None:
        return self.section

    def mismatches(self, plan: Plan, run: LiveRun, layers: Layers) -> Iterator[Problem]:
        """Another kind tells where it is missing, or too much."""
        yield from ()


class HeldAttention(_Usual):
    section, half, name = ATTENTION, ATTENTION.half, ATTENTION.name


class HeldMlp(_Usual):
    section, half, name = MLP, MLP.half, MLP.name
