"""Recipes for FP8 and FP4: the scales with which Transformer Engine stores a tensor in eight or four bits per element.

delayed      one scale per tensor, from the largest magnitudes of earlier steps      Hopper, Blackwell
tensorwise   one scale per tensor, from the tensor itself                            Hopper, Blackwell
blockwise    one for 128 elements of an activation, for 128 x 128 of a weight        Hopper
mxfp8        one for 32 elements                                                     Blackwell
nvfp4        one for 16 elements, and one per tensor; 16 x 16 of a weight            Blackwell

NVFP4 uses random numbers only to round gradients. Inputs and gradients that are read by columns are multiplied by a Hadamard
matrix, the same one in every call. So a recomputed cast has the same bits (Transformer Engine's `NVFP4BlockScaling`, 2.9 to
2.20).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Recipe = Literal["delayed", "tensorwise", "mxfp8", "blockwise", "nvfp4"]


@dataclass(frozen=True)
class Storage:
    made_by: str
    """The class of Transformer Engine's recipe (`transformer_engine.common.recipe`)."""
    block: int | None = None
    """Elements of an activation per scale. Scales by rows and by columns differ, so both are cast from the unquantized tensor,
    and one gather cannot serve both; None: one scale per tensor, and the data by columns is a transposed copy."""
    bits: int = 8
    """Bits per element, without scales."""
    searched: bool = False
    """Whether every call searches the largest magnitude of the tensor. Ranks with parts of a tensor reduce it."""
    multiples: tuple[int, int] = (8, 16)
    """Alignment of rows and columns for cuBLAS."""
    held_in_buffer: bool = True
    """Whether a weight in FP8 lies in the optimizer's parameter buffer, by rows, and is gathered so. Otherwise it is gathered in
    16 bits, in the gradient buffer (`--reuse-grad-buf-for-mxfp8-param-ag`), and each rank casts it all."""
    gathered_multiple: int = 1
    """Alignment of rows and columns that sequence parallelism gathers."""
    rows_of_expert: int = 16
    """Alignment of each expert's rows in Megatron (`get_fp8_align_size`, `get_fp4_align_size`)."""


STORED: Mapping[Recipe, Storage] = {
    "delayed": Storage("DelayedScaling"),
    "tensorwise": Storage("Float8CurrentScaling", searched=True),
    "blockwise": Storage("Float8BlockScaling", block=128, gathered_multiple=128),
    "mxfp8": Storage("MXFP8BlockScaling", block=32, multiples=(32, 32), held_in_buffer=False, rows_of_expert=32),
    "nvfp4": Storage("NVFP4BlockScaling", block=16, bits=4, searched=True, multiples=(32, 32), rows_of_expert=128),
}

PER_TENSOR: tuple[Recipe, ...] = tuple(recipe for recipe, storage in STORED.items() if storage.block is None)


def reduces_amaxes(recipe: Recipe | None) -> bool:
    """Whether casting an input that sequence parallelism gathers communicates in every call."""
    return recipe is not None and STORED[recipe].searched


def gathers_once(recipe: Recipe | None) -> bool:
    """Whether forward's gathered input also serves the weight gradient; with block scales it does not."""
    return recipe is None or STORED[recipe].block is None
