"""Recipes for FP8 and FP4: how the scales are found with which Transformer Engine stores a tensor in eight or four bits a number.

delayed      one scale a tensor, from the largest magnitudes of earlier steps        Hopper, Blackwell
tensorwise   one scale a tensor, from the tensor itself                              Hopper, Blackwell
blockwise    one for 128 numbers of an activation, for 128 x 128 of a weight         Hopper
mxfp8        one for 32 numbers                                                      Blackwell
nvfp4        one for 16 numbers, and one for all of them; 16 x 16 of a weight        Blackwell

NVFP4 draws random numbers where it rounds gradients, and nowhere else; inputs and gradients that are read by columns it turns by
a Hadamard matrix, the same one in every call. So what forward cast is cast again to the same bits (Transformer Engine's
`NVFP4BlockScaling`, 2.9 to 2.20).

What differs between them is data here, which planning and runs ask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_lynx.errors import Problem

Recipe = Literal["delayed", "tensorwise", "mxfp8", "blockwise", "nvfp4"]


@dataclass(frozen=True)
class Storage:
    """How a recipe stores a tensor."""

    made_by: str
    """The class of Transformer Engine's recipes (`transformer_engine.common.recipe`)."""
    block: int | None = None
    """How many numbers of an activation have one scale: by rows and by columns other ones, so both are cast from the numbers, and
    one gather cannot serve both. None: all of a tensor, and what is read by columns is a transposed copy."""
    bits: int = 8
    """Of one number, scales apart."""
    searched: bool = False
    """Whether every call looks for the largest number of all, for a scale of them all: where ranks each have a part of a tensor,
    they reduce it."""
    multiples: tuple[int, int] = (8, 16)
    """Of how many rows and columns a matrix must be that cuBLAS takes."""
    held_in_buffer: bool = True
    """Whether a weight that is held in FP8 lies in the optimizer's buffer of parameters, by rows, and is gathered so. Otherwise
    it is gathered in 16 bits, in the buffer of gradients (`--reuse-grad-buf-for-mxfp8-param-ag`), and each rank casts it all."""
    gathered_multiple: int = 1
    """The same of both, where sequence parallelism gathers it."""
    rows_of_expert: int = 16
    """Up to which multiple Megatron fills up the rows of each expert (`get_fp8_align_size`, `get_fp4_align_size`)."""


STORED: Mapping[Recipe, Storage] = {
    "delayed": Storage("DelayedScaling"),
    "tensorwise": Storage("Float8CurrentScaling", searched=True),
    "blockwise": Storage("Float8BlockScaling", block=128, gathered_multiple=128),
    "mxfp8": Storage("MXFP8BlockScaling", block=32, multiples=(32, 32), held_in_buffer=False, rows_of_expert=32),
    "nvfp4": Storage("NVFP4BlockScaling", block=16, bits=4, searched=True, multiples=(32, 32), rows_of_expert=128),
}

PER_TENSOR: tuple[Recipe, ...] = tuple(recipe for recipe, storage in STORED.items() if storage.block is None)


def reduces_amaxes(recipe: Recipe | None) -> bool:
    """Whether casting what sequence parallelism gathers communicates in every call."""
    return recipe is not None and STORED[recipe].searched


def gathers_once(recipe: Recipe | None) -> bool:
    """Whether what forward gathers of a linear's input serves its weight gradient, too: with block scales it does not."""
    return recipe is None or STORED[recipe].block is None


def lacking(recipe: Recipe, where: str) -> Problem:
    """What is said of a Transformer Engine that does not have a recipe."""
    option = "--fp4-recipe" if STORED[recipe].bits == 4 else "--fp8-recipe"
    needed = f"one that this Transformer Engine has: it has no {STORED[recipe].made_by}"
    return Problem(where, recipe, needed, f"install a Transformer Engine that has it, or drop {option}")


def lacking_here(recipe: Recipe | None, where: str) -> Problem | None:
    """The same of the one that is installed here; None where there is none, or where it has the recipe. It is not imported: that
    takes a GPU's libraries."""
    if recipe is None or STORED[recipe].made_by in _text_of_recipes():
        return None
    problem = lacking(recipe, where)
    return replace(problem, todo=f"{problem.todo}; or plan for another machine where no Transformer Engine is installed")


@cache
def _text_of_recipes() -> str:
    """Of the installed release; the names of all where there is none."""
    found = find_spec("transformer_engine")
    folders = [] if found is None else found.submodule_search_locations or []
    files = [file for folder in folders if (file := Path(folder, "common", "recipe", "__init__.py")).is_file()]
    return files[0].read_text(encoding="utf-8") if files else " ".join(storage.made_by for storage in STORED.values())
