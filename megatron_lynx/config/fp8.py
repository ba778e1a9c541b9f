"""FP8 as a job states it: in which formats the linears of Transformer Engine's layers compute, and how scales are found.

delayed      one scale a tensor, from the largest magnitudes of earlier steps        Hopper, Blackwell
tensorwise   one scale a tensor, from the tensor itself                              Hopper, Blackwell
blockwise    one for 128 numbers of an activation, for 128 x 128 of a weight         Hopper
mxfp8        one for 32 numbers                                                      Blackwell
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Recipe = Literal["delayed", "tensorwise", "mxfp8", "blockwise"]

RUN_BY_PLANS: tuple[Recipe, ...] = ("delayed", "tensorwise")
"""Those whose replays have been shown to leave no trace."""


class Fp8(BaseModel):
    """Megatron's `--fp8-format` and `--fp8-recipe`. Weights themselves stay in the model's type."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: E4M3, but gradients in E5M2."""
    recipe: Recipe = "delayed"
