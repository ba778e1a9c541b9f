"""What a transformer layer consists of and where its windows are, as data: sections, items, collectives, addresses."""

from megatron_lynx.anatomy.dense import (
    ATTENTION,
    CODE_ITEMS,
    COLUMN_PARALLEL,
    DENSE,
    ITEMS,
    LINEARS,
    MLP,
    REPLAYABLE,
    ROW_PARALLEL,
)
from megatron_lynx.anatomy.experts import (
    ALL_ITEMS,
    EXPERTS,
    EXPERTS_WITH_SHARED,
    FILLING,
    SHARED_EXPERTS,
    names_in,
    sections_of,
)
from megatron_lynx.anatomy.latent import LATENT, LATENT_ITEMS, halves_of, latent_section
from megatron_lynx.anatomy.section import EXPERTS_LINEARS, HALVES, PASSES, Collective, Half, Item, Pass, Role, Section

__all__ = [
    "ALL_ITEMS",
    "ATTENTION",
    "CODE_ITEMS",
    "COLUMN_PARALLEL",
    "Collective",
    "DENSE",
    "EXPERTS",
    "EXPERTS_LINEARS",
    "EXPERTS_WITH_SHARED",
    "FILLING",
    "HALVES",
    "Half",
    "ITEMS",
    "Item",
    "LATENT",
    "LATENT_ITEMS",
    "LINEARS",
    "MLP",
    "PASSES",
    "Pass",
    "REPLAYABLE",
    "ROW_PARALLEL",
    "Role",
    "SHARED_EXPERTS",
    "Section",
    "halves_of",
    "latent_section",
    "names_in",
    "sections_of",
]
