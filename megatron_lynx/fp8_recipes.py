"""Recipes for FP8: how the scales are found with which Transformer Engine stores a tensor in eight bits a number.

delayed      one scale a tensor, from the largest magnitudes of earlier steps        Hopper, Blackwell
tensorwise   one scale a tensor, from the tensor itself                              Hopper, Blackwell
blockwise    one for 128 numbers of an activation, for 128 x 128 of a weight         Hopper
mxfp8        one for 32 numbers                                                      Blackwell

What differs between them is data here, which planning and runs ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Recipe = Literal["delayed", "tensorwise", "mxfp8", "blockwise"]


@dataclass(frozen=True)
class Storage:
    """How a recipe stores a tensor."""

    made_by: str
    """The class of Transformer Engine's recipes (`transformer_engine.common.recipe`)."""
    block: int | None = None
    """How many numbers of an activation have one scale: by rows and by columns other ones, so both are cast from the numbers, and
    one gather cannot serve both. None: all of a tensor, and what is read by columns is a transposed copy."""
    multiples: tuple[int, int] = (8, 16)
    """Of how many rows and columns a matrix must be that cuBLAS takes."""
    held_in_buffer: bool = True
    """Whether a weight that is held in FP8 lies in the optimizer's buffer of parameters, by rows, and is gathered so. Otherwise
    it is gathered in 16 bits, in the buffer of gradients (`--reuse-grad-buf-for-mxfp8-param-ag`), and each rank casts it all."""
    gathered_multiple: int = 1
    """The same of both, where sequence parallelism gathers it."""
    rows_of_expert: int = 16
    """Up to which multiple Megatron fills up the rows of each expert (`get_fp8_align_size`)."""


STORED: Mapping[Recipe, Storage] = {
    "delayed": Storage("DelayedScaling"),
    "tensorwise": Storage("Float8CurrentScaling"),
    "blockwise": Storage("Float8BlockScaling", block=128, gathered_multiple=128),
    "mxfp8": Storage("MXFP8BlockScaling", block=32, multiples=(32, 32), held_in_buffer=False, rows_of_expert=32),
}

PER_TENSOR: tuple[Recipe, ...] = tuple(recipe for recipe, storage in STORED.items() if storage.block is None)


def gathers_once(recipe: Recipe | None) -> bool:
    """Whether what forward gathers of a linear's input serves its weight gradient, too: with block scales it does not."""
    return recipe is None or STORED[recipe].block is None
