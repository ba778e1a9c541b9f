"""A transformer layer as data: sections, items, collectives, and addresses of windows."""

from collections.abc import Sequence
from typing import TypeVar

from megatron_lynx.kinds.dense.section import (
    ATTENTION,
    CODE_ITEMS,
    COLUMN_PARALLEL,
    DENSE,
    ITEMS,
    LINEARS,
    MLP,
    RECOMPUTABLE,
    ROW_PARALLEL,
)
from megatron_lynx.kinds.experts.section import EXPERTS, EXPERTS_WITH_SHARED, SHARED_EXPERTS
from megatron_lynx.kinds.latent.section import LATENT
from megatron_lynx.kinds.section import EXPERTS_LINEARS, HALVES, PASSES, Collective, Half, Item, Pass, Role, Section
from megatron_lynx.kinds.sections import Facts, LayerKind, all_items, filling, halves_of, names_in, sections_of

__all__ = [
    "ATTENTION",
    "CODE_ITEMS",
    "COLUMN_PARALLEL",
    "Collective",
    "DENSE",
    "EXPERTS",
    "EXPERTS_LINEARS",
    "EXPERTS_WITH_SHARED",
    "Facts",
    "HALVES",
    "Half",
    "ITEMS",
    "Item",
    "LATENT",
    "LINEARS",
    "LayerKind",
    "MLP",
    "PASSES",
    "Pass",
    "RECOMPUTABLE",
    "ROW_PARALLEL",
    "Role",
    "SHARED_EXPERTS",
    "Section",
    "all_items",
    "by_layer",
    "filling",
    "halves_of",
    "names_in",
    "sections_of",
]

HalfT = TypeVar("HalfT")


def by_layer(halves: Sequence[HalfT]) -> tuple[tuple[HalfT, HalfT], ...]:
    """Pairs of the halves of each layer, of what is listed half by half."""
    return tuple(zip(halves[::2], halves[1::2], strict=True))
