"""FP8 as a job states it: in which formats the linears of Transformer Engine's layers compute, and how scales are found."""

from __future__ import annotations

from typing import Literal

from megatron_lynx.fp8_recipes import Recipe
from megatron_lynx.validation import Part


class Fp8(Part):
    """Megatron's `--fp8-format` and `--fp8-recipe`. Weights themselves stay in the model's type."""

    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: E4M3, but gradients in E5M2."""
    recipe: Recipe = "delayed"
