"""FP8 as a job states it: in which formats the linears of Transformer Engine's layers compute, and how scales are found."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from megatron_lynx.fp8_recipes import Recipe


class Fp8(BaseModel):
    """Megatron's `--fp8-format` and `--fp8-recipe`. Weights themselves stay in the model's type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: E4M3, but gradients in E5M2."""
    recipe: Recipe = "delayed"
