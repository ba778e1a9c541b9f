"""The section that fills the MLP half of a layer of experts.

It is opaque for now: what a router decides must not be decided again, and its dispatch communicates in the middle of the half, so
nothing in it runs ahead of time. Its norm and its residual addition are those of a dense layer, which is how they are priced.
"""

from __future__ import annotations

from megatron_lynx.anatomy.dense import ATTENTION, MLP
from megatron_lynx.anatomy.section import Item, Section

EXPERTS = Section(
    name="experts",
    half=MLP.half,
    method=MLP.method,
    items=(Item(MLP.norm, "norm"), Item("experts", "opaque", path="mlp"), Item(MLP.residual, "residual")),
)


def sections_of(*, experts: bool = False) -> tuple[Section, Section]:
    """What fills the halves of a layer, in the order of a forward. `experts`: whether it has a mixture of experts."""
    return ATTENTION, EXPERTS if experts else MLP
